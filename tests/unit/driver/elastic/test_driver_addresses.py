from __future__ import annotations

import socket

from sparkhvd._util.addresses import is_loopback, outgoing_address
from sparkhvd.comm.connect.rendezvous import RendezvousClient, RendezvousServer
from sparkhvd.deadline import Deadline
from sparkhvd.driver.elastic.driver_addresses import driver_addresses
from sparkhvd.rpc.interfaces import interfaces

REMOTE_ADDRESS = "192.0.2.77"  # an address for documentation (RFC 5737)


def addresses_of_this_machine() -> list[str]:
    return [interface.address for interface in interfaces() if not is_loopback(interface.address)] or ["127.0.0.1"]


def test_a_job_only_on_this_machine_is_served_on_loopback():
    assert driver_addresses(["localhost", "127.0.0.1", socket.gethostname()]) == ("127.0.0.1", ["127.0.0.1"])


def test_hosts_that_one_interface_reaches_are_served_only_at_its_address():
    address = outgoing_address(REMOTE_ADDRESS)
    expected = (address, [address]) if not is_loopback(address) else driver_addresses(None)
    assert driver_addresses(["localhost", REMOTE_ADDRESS]) == expected


def test_unknown_hosts_and_names_that_only_ssh_resolves_are_served_at_all_addresses():
    for hosts in (None, ["localhost", "no.host.invalid"], [REMOTE_ADDRESS, "no.host.invalid"]):
        bound, addresses = driver_addresses(hosts)
        assert addresses == addresses_of_this_machine()
        with RendezvousServer(b"token", bound) as server:
            for address in addresses:
                RendezvousClient([(address, server.port)], b"token", Deadline.after(10)).close()
