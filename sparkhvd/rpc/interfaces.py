"""The network interfaces of this machine and their addresses."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkhvd._util.addresses import is_ipv6, is_ipv6_only, is_loopback
from sparkhvd.errors import LaunchError

# The requests of netdevice(7), which are equal on every architecture of Linux.
_SIOCGIFADDR = 0x8915
_SIOCGIFNETMASK = 0x891B
_NAME_BYTES = 16
_IF_INET6 = Path("/proc/net/if_inet6")
# IPV6_ADDR_LINKLOCAL of the kernel's net/ipv6.h; IFA_F_TENTATIVE and IFA_F_DADFAILED of linux/if_addr.h.
_LINK_SCOPE = 0x20
_NOT_YET_OURS = 0x40 | 0x08


@dataclass(frozen=True)
class Interface:
    """One address of a network interface.

    Attributes:
        name: its name in the kernel.
        address: one of its addresses.
        network: the network of the address, like ``10.1.0.0/16``.
    """

    name: str
    address: str
    network: str


def interfaces() -> list[Interface]:
    """Return the addresses of all interfaces of this network namespace, including loopback, IPv4 addresses first."""
    return _with_ipv4() + parse_if_inet6(_IF_INET6.read_text() if _IF_INET6.exists() else "")


def parse_if_inet6(text: str) -> list[Interface]:
    """Return the addresses in the kernel's list ``/proc/net/if_inet6`` that a server can bind.

    A line has the address in hexadecimal digits, the interface's number, the length of the network's prefix, the scope,
    flags and the interface's name. Link-local addresses are skipped because they are invalid on other hosts.
    """
    addresses = []
    for line in text.splitlines():
        digits, _, prefix, scope, flags, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if int(scope, 16) == _LINK_SCOPE or int(flags, 16) & _NOT_YET_OURS:
            continue
        network = ipaddress.ip_network((address, int(prefix, 16)), strict=False)
        addresses.append(Interface(name, str(address), str(network)))
    return addresses


def _with_ipv4() -> list[Interface]:
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                address, mask = (_address_of(probe, name, request) for request in (_SIOCGIFADDR, _SIOCGIFNETMASK))
            except OSError:
                continue  # it has no IPv4 address
            addresses.append(Interface(name, address, str(ipaddress.ip_network(f"{address}/{mask}", strict=False))))
    return addresses


def _address_of(probe: socket.socket, name: str, request: int) -> str:
    request_data = struct.pack("256s", name.encode()[: _NAME_BYTES - 1])
    return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), request, request_data)[20:24])


def candidates(nics: Sequence[str], host: str, peer_hosts: Sequence[str]) -> list[Interface]:
    """Return the interfaces on which peers might reach this machine.

    Args:
        nics: the names of the interfaces to use; empty considers all.
        host: this machine's name in the cluster.
        peer_hosts: the peers' names in the cluster.

    Raises:
        LaunchError: none of ``nics`` has an address here.
    """
    available = interfaces()
    if nics:
        chosen = _preferred([interface for interface in available if interface.name in nics], host)
        if not chosen:
            raise LaunchError(
                f"None of the network interfaces {list(nics)} has an address on host {host}; its interfaces are "
                f"{list(dict.fromkeys(interface.name for interface in available))}. Set nics to some of these."
            )
        return chosen
    if is_loopback(host) and all(is_loopback(peer) for peer in peer_hosts):
        return [interface for interface in available if is_loopback(interface.address)]
    return _preferred([interface for interface in available if not is_loopback(interface.address)] or available, host)


def _preferred(addresses: list[Interface], host: str) -> list[Interface]:
    """Return the IPv4 addresses, unless there are none or the cluster knows this machine only by IPv6.

    Hosts often have IPv6 addresses that other hosts cannot reach, and it takes long to try them.
    """
    preferred = [interface for interface in addresses if is_ipv6(interface.address) == is_ipv6_only(host)]
    return preferred or addresses
