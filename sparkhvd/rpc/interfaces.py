"""The network interfaces of this machine and their IPv4 addresses."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from sparkhvd.addresses import is_loopback
from sparkhvd.errors import LaunchError

# The requests of netdevice(7), which say the same on every architecture that Linux runs on.
_SIOCGIFADDR = 0x8915
_SIOCGIFNETMASK = 0x891B
_NAME_BYTES = 16


@dataclass(frozen=True)
class Interface:
    """One interface that has an address.

    Attributes:
        name: the kernel's.
        address: its IPv4 address.
        network: the network that it belongs to, like ``10.1.0.0/16``.
    """

    name: str
    address: str
    network: str


def interfaces() -> list[Interface]:
    """All interfaces of this network namespace that have an IPv4 address, loopback included."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                address, mask = (_asked(probe, name, request) for request in (_SIOCGIFADDR, _SIOCGIFNETMASK))
            except OSError:
                continue  # it has none
            found.append(Interface(name, address, str(ipaddress.ip_network(f"{address}/{mask}", strict=False))))
    return found


def _asked(probe: socket.socket, name: str, request: int) -> str:
    question = struct.pack("256s", name.encode()[: _NAME_BYTES - 1])
    return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), request, question)[20:24])


def candidates(nics: Sequence[str], host: str, peer_hosts: Sequence[str]) -> list[Interface]:
    """The interfaces on which peers might reach this machine.

    Args:
        nics: the ones to use; empty leaves the choice open.
        host: how the cluster calls this machine.
        peer_hosts: how it calls the machines of all peers.

    Raises:
        LaunchError: none of ``nics`` has an address here.
    """
    there = interfaces()
    if nics:
        chosen = [one for one in there if one.name in nics]
        if not chosen:
            raise LaunchError(
                f"None of the network interfaces {list(nics)} has an address on host {host}; "
                f"it has {[one.name for one in there]}."
            )
        return chosen
    if is_loopback(host) and all(is_loopback(peer) for peer in peer_hosts):
        return [one for one in there if is_loopback(one.address)]
    return [one for one in there if not is_loopback(one.address)] or there
