"""Addresses of machines: their notation, and the choice of the local address that a server binds."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

LOOPBACK = "127.0.0.1"
_DISCARD_PORT = 9
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` names this machine by a name or address that no other machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_ipv6(host: str) -> bool:
    """Return whether ``host`` is an IPv6 address, without brackets; it may have a scope (``fe80::1%eth0``)."""
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def is_ipv6_only(host: str) -> bool:
    """Return whether ``host`` is an IPv6 address, or a name that resolves only to such addresses."""
    families = {family for family, _ in _resolve(host)}
    return families == {socket.AF_INET6}


def without_brackets(host: str) -> str:
    """Return a host without the brackets that surround IPv6 addresses in URLs and in Spark's settings."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def with_port(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_to_bind(own_host: str, peer_hosts: Sequence[str]) -> str:
    """Return a local address that peers on ``peer_hosts`` can reach.

    This is loopback if all peers are on ``own_host``. Otherwise it is the address that ``own_host`` resolves to, if
    this machine has that address. Otherwise (for example behind NAT, or on Debian, where the name of a host resolves to
    loopback on the host itself) it is the source address of packets to the peers.
    """
    elsewhere = [host for host in peer_hosts if host != own_host]
    if not elsewhere:
        return LOOPBACK
    for _, address in _resolve(own_host):
        if _can_bind(address) and (is_loopback(own_host) or not is_loopback(address)):
            return address
    outgoing = (outgoing_address(host) for host in elsewhere)
    return next((address for address in outgoing if address != LOOPBACK), LOOPBACK)


def outgoing_address(towards: str) -> str:
    """Return the local source address of packets to a host; nothing is sent."""
    for family, address in _resolve(towards):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, _DISCARD_PORT))
            except OSError:
                continue
            own: str = probe.getsockname()[0]
            return own
    return LOOPBACK


def _resolve(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses of a host, IPv4 first, without IPv6 addresses that are valid on one link only."""
    try:
        resolved = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    addresses = [(family, str(address[0])) for family, _, _, _, address in resolved if family in _FAMILIES]
    usable = [entry for entry in addresses if not _needs_scope(entry[1])]
    return sorted(usable, key=lambda entry: _FAMILIES.index(entry[0]))


def _needs_scope(address: str) -> bool:
    return is_ipv6(address) and ipaddress.ip_address(address).is_link_local


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if is_ipv6(address) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True
