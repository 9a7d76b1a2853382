"""The addresses that a rank offers to its peers: a pure decision about this host's interfaces."""

from __future__ import annotations

from collections.abc import Sequence

from sparkhvd._util.addresses import is_loopback
from sparkhvd.errors import ConfigError

# Interface name, numeric address, whether it is a loopback.
LocalAddress = tuple[str, str, bool]


def addresses_to_offer(chosen: str, interfaces: str, local: Sequence[LocalAddress]) -> list[str]:
    """Return the local addresses that a rank binds and offers to its peers, the preferred one first.

    Args:
        chosen: the address that the launcher found; loopback if all ranks are on this host.
        interfaces: names of the interfaces to use, separated by commas; empty leaves the choice open.
        local: this host's addresses.

    Raises:
        ConfigError: none of ``interfaces`` has an address here.
    """
    names = [name.strip() for name in interfaces.split(",") if name.strip()]
    if names:
        offered = [host for name in names for interface, host, _ in local if interface == name]
        if not offered:
            available = ", ".join(dict.fromkeys(interface for interface, _, _ in local))
            raise ConfigError(
                f"None of the network interfaces {', '.join(names)} has an address here; this host has {available}. "
                "Name one of them in SPARKHVD_NETWORK_INTERFACES, or leave it empty."
            )
        return offered
    if is_loopback(chosen):
        return [chosen]
    return list(dict.fromkeys([chosen, *(host for _, host, loopback in local if not loopback)]))
