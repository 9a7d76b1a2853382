from __future__ import annotations

import socket

from sparkhvd._util.addresses import (
    address_to_bind,
    is_ipv6_only,
    is_loopback,
    outgoing_address,
    with_port,
    without_brackets,
)


def test_peers_on_one_host_meet_on_loopback():
    assert address_to_bind("10.9.8.7", ["10.9.8.7", "10.9.8.7"]) == "127.0.0.1"


def test_an_own_address_is_bound_when_a_peer_is_elsewhere():
    assert address_to_bind("127.0.0.3", ["127.0.0.3", "127.0.0.4"]) == "127.0.0.3"


def test_a_foreign_address_is_replaced_by_the_outgoing_one():
    assert address_to_bind("192.0.2.200", ["192.0.2.200", "127.0.0.9"]) == "127.0.0.1"


def test_loopback_is_recognized_by_name_and_address():
    assert [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "10.0.0.1", "node-7")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_an_own_ipv6_address_is_bound_if_peers_are_elsewhere():
    assert address_to_bind("::1", ["::1", "fd00::9"]) == "::1"
    assert outgoing_address("::1") == "::1"


def test_ipv6_addresses_with_a_port_are_in_brackets():
    assert [with_port("fd00::5", 7), with_port("node-7", 7)] == ["[fd00::5]:7", "node-7:7"]
    assert [without_brackets("[fd00::5]"), without_brackets("node-7")] == ["fd00::5", "node-7"]
    assert [is_ipv6_only(host) for host in ("fd00::5", "127.0.0.1", "no-such-host.invalid")] == [True, False, False]


def test_link_local_ipv4_addresses_are_reachable_like_others():
    peer = "169.254.7.7"  # machines that are connected directly, without DHCP
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        expected = probe.getsockname()[0]
    assert address_to_bind("192.0.2.200", [peer]) == outgoing_address(peer) == expected
    assert outgoing_address("fe80::1") == "127.0.0.1"


def test_a_name_that_resolves_to_loopback_is_not_bound_if_a_peer_is_elsewhere():
    peer, name = "169.254.7.7", "127.1"  # resolves like the own name of a Debian host, but is not known as loopback
    assert socket.gethostbyname(name) == "127.0.0.1"
    assert address_to_bind(name, [name, peer]) == outgoing_address(peer) != "127.0.0.1"
    assert address_to_bind(name, [name, "localhost"]) == "127.0.0.1"
