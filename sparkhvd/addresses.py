"""Which address of this machine a server binds."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a name or address of the machine itself that no other machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_to_bind(own_host: str, peer_hosts: Sequence[str]) -> str:
    """The one local address that peers on ``peer_hosts`` can reach.

    Loopback when all peers are on ``own_host``; else what ``own_host`` resolves to, if that is an address of this
    machine; else (behind address translation, say) the one from which packets towards the peers would leave.
    """
    if all(host == own_host for host in peer_hosts):
        return LOOPBACK
    own_address = _resolve(own_host)
    if own_address is not None and _can_bind(own_address):
        return own_address
    elsewhere = next(host for host in peer_hosts if host != own_host)
    return outgoing_address(elsewhere)


def outgoing_address(towards: str) -> str:
    """The local address from which packets towards a host would leave; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
        except OSError:
            return LOOPBACK
        address: str = probe.getsockname()[0]
        return address


def _resolve(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def _can_bind(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True
