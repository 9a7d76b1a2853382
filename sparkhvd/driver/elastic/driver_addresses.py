"""The addresses at which the hosts of an elastic job reach this driver."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from sparkhvd._util.addresses import LOOPBACK, is_loopback, outgoing_address
from sparkhvd.driver.host_process import is_this_machine
from sparkhvd.rpc.interfaces import interfaces


def driver_addresses(hosts: Sequence[str] | None) -> tuple[str, list[str]]:
    """Return the local address to bind, and the addresses at which the hosts may reach this driver.

    If all hosts reach the driver at the same address, only that address is bound; it is loopback if all ranks run on
    this machine. Otherwise all addresses are bound.

    Args:
        hosts: the names of the hosts; None if they are not known yet.
    """
    remote_hosts = [host for host in hosts or () if not is_this_machine(host)]
    if hosts is not None and not remote_hosts:
        return LOOPBACK, [LOOPBACK]
    addresses = list({outgoing_address(host) for host in remote_hosts})
    if len(addresses) == 1 and not is_loopback(addresses[0]):  # loopback means that only ssh resolves the name
        return addresses[0], addresses
    all_addresses = [interface.address for interface in interfaces() if not is_loopback(interface.address)]
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0", all_addresses or [LOOPBACK]  # noqa: S104
