"""The addresses of a machine that other machines can reach."""

from __future__ import annotations

import pytest

from sparkhvd.rpc import interfaces
from sparkhvd.rpc.interfaces import Interface, candidates, parse_if_inet6

IF_INET6 = """\
fd0a0000000000000000000000000005 02 40 00 80     eth0
fd0a0000000000000000000000000006 02 40 00 40     eth0
fe8000000000000000000000000000ab 02 40 20 80     eth0
00000000000000000000000000000001 01 80 10 80       lo
"""
V4, V6 = Interface("eth0", "10.0.0.5", "10.0.0.0/24"), Interface("eth0", "fd0a::5", "fd0a::/64")
LOOPBACKS = [Interface("lo", "127.0.0.1", "127.0.0.0/8"), Interface("lo", "::1", "::1/128")]


def test_link_local_and_tentative_addresses_are_omitted():
    assert parse_if_inet6(IF_INET6) == [V6, LOOPBACKS[1]]


def test_this_machine_has_a_loopback():
    assert LOOPBACKS[0] in interfaces.interfaces()


@pytest.mark.parametrize(
    ("available", "host", "chosen"),
    [
        ([V4, V6], "10.0.0.5", [V4]),
        ([V4, V6], "fd0a::5", [V6]),
        ([V6], "no-such-host.invalid", [V6]),
        ([V4, V6], "no-such-host.invalid", [V4]),
    ],
)
@pytest.mark.parametrize("nics", [[], ["eth0"]])
def test_ipv4_addresses_are_preferred_unless_the_host_is_an_ipv6_address(available, host, chosen, nics, monkeypatch):
    monkeypatch.setattr(interfaces, "interfaces", lambda: [*LOOPBACKS, *available])
    assert candidates(nics, host, [host, "10.0.0.6"]) == chosen
