from __future__ import annotations

from sparkhvd.addresses import address_to_bind, is_loopback


def test_peers_on_one_host_meet_on_loopback():
    assert address_to_bind("10.9.8.7", ["10.9.8.7", "10.9.8.7"]) == "127.0.0.1"


def test_an_own_address_is_bound_when_a_peer_is_elsewhere():
    assert address_to_bind("127.0.0.3", ["127.0.0.3", "127.0.0.4"]) == "127.0.0.3"


def test_an_address_that_is_not_ours_is_replaced_by_the_outgoing_one():
    assert address_to_bind("192.0.2.200", ["192.0.2.200", "127.0.0.9"]) == "127.0.0.1"


def test_loopback_is_recognised_by_name_and_address():
    assert [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "10.0.0.1", "node-7")] == [
        True,
        True,
        True,
        False,
        False,
    ]
