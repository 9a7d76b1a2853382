from __future__ import annotations

import pytest

from sparkhvd.driver.mpi.ring import in_common
from sparkhvd.rpc.registration import TaskServer


def server(interface: str, address: str) -> TaskServer:
    return TaskServer(interface, address, 4000, f"{address.rpartition('.')[0]}.0/24")


@pytest.mark.parametrize(
    ("usable", "addresses"),
    [
        # One network, whatever its interfaces are called.
        ([["eth0 10.0.0.1", "ib0 10.1.0.1"], ["ens5 10.0.0.2", "ib0 10.1.0.2"]], ["10.0.0.1", "10.0.0.2"]),
        ([["eth0 10.0.0.1", "ib0 10.1.0.1"], ["ib0 10.1.0.2"]], ["10.1.0.1", "10.1.0.2"]),
        # Networks with routers between them: interfaces of one name are of one kind, most likely.
        ([["eth1 10.0.0.1", "eth0 10.1.0.1"], ["eth0 10.2.0.2"]], ["10.1.0.1", "10.2.0.2"]),
        ([["eth0 10.0.0.1"], ["ens5 10.2.0.2", "ens6 10.3.0.2"]], ["10.0.0.1", "10.2.0.2"]),
        ([["eth0 10.0.0.1"], []], []),
        ([["lo 127.0.0.1"]], ["127.0.0.1"]),
    ],
)
def test_a_network_goes_before_a_name_and_any_address_is_better_than_none(usable, addresses):
    servers = [[server(*one.split()) for one in own] for own in usable]
    assert [one.address for one in in_common(servers)] == addresses
