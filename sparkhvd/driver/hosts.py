"""Lists of hosts and their slots, in the syntax of ``-H`` and of host files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sparkhvd._util.addresses import is_ipv6, with_port, without_brackets
from sparkhvd._util.counts import counted
from sparkhvd.errors import ConfigError, SlotsError

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
# "name:slots", where a name that is an IPv6 address stands in brackets.
_ENTRY = re.compile(r"(?:\[(?P<address>[^\]]*)\]|(?P<name>[^:\[\]]*))(?::(?P<slots>[^:\[\]]*))?")


@dataclass(frozen=True)
class Host:
    """A machine and the number of ranks it may run; ``name`` is a name or an address, without brackets."""

    name: str
    slots: int

    @property
    def text(self) -> str:
        """Return the entry for this host in a list of hosts."""
        return with_port(self.name, self.slots)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of ``host1:2,host2:4,[fd00::5]:2``; an entry without a number has one slot.

    Raises:
        ConfigError: the text is not a list of hosts, or lists a host twice.
    """
    if not isinstance(text, str):
        raise ConfigError(f"hosts must be one string like 'host1:2,host2:2', got {text!r}.")
    return _require_distinct([_parse_entry(part.strip()) for part in text.split(",") if part.strip()], text)


def parse_hostfile(text: str) -> tuple[Host, ...]:
    """Return the hosts of a file with lines like ``host1 slots=2``; empty lines and comments (``#``) are skipped.

    Raises:
        ConfigError: a line has another form, or a host is listed twice.
    """
    hosts = []
    for raw in text.splitlines():
        words = raw.partition("#")[0].split()
        if not words:
            continue
        options = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")]
        if len(words) != 1 + len(options) or len(options) > 1:
            raise ConfigError(f"The host file has an invalid line {raw!r}. Write lines like 'host1 slots=2'.")
        hosts.append(_make_host(without_brackets(words[0]), options[0] if options else "1"))
    return _require_distinct(hosts, text)


def take_slots(hosts: Sequence[Host], num_proc: int | None) -> tuple[Host, ...]:
    """Return the first hosts that have slots for all ranks, with as many slots as there are ranks in total.

    Raises:
        SlotsError: there are fewer slots than ranks.
    """
    remaining = sum(host.slots for host in hosts) if num_proc is None else num_proc
    check_slots(hosts, "num_proc", remaining)
    used_hosts = []
    for host in hosts:
        count = min(host.slots, remaining)
        remaining -= count
        if count:
            used_hosts.append(Host(host.name, count))
    return tuple(used_hosts)


def check_slots(hosts: Sequence[Host], name: str, ranks: int) -> None:
    """Check that hosts have slots for all ranks; ``name`` is the argument that sets their number.

    Raises:
        SlotsError: there are fewer slots than ranks.
    """
    available = sum(host.slots for host in hosts)
    if ranks > available:
        shown = ",".join(host.text for host in hosts)
        raise SlotsError(
            f"{name}={ranks} is more than the {counted(available, 'slot')} of the hosts ({shown}). Add hosts or slots, "
            f"or lower {name}."
        )


def check_name(name: str) -> None:
    """Check that a host is named by a valid host name or address.

    Raises:
        ConfigError: the name is neither.
    """
    if not is_ipv6(name) and (not _NAME.fullmatch(name) or name.startswith("-")):
        raise ConfigError(f"{name!r} is not a valid host name.")


def _parse_entry(text: str) -> Host:
    if is_ipv6(text):
        raise ConfigError(
            f"{text!r} is ambiguous: its last part may belong to the address or be the number of slots. Write "
            f"[{text}] or [ADDRESS]:SLOTS."
        )
    parts = _ENTRY.fullmatch(text)
    if parts is None:
        raise ConfigError(f"{text!r} is not a valid host. Write hosts like 'host1:2' or '[fd00::5]:2'.")
    address, name, slots = parts["address"], parts["name"], parts["slots"]
    if address is not None and not is_ipv6(address):
        raise ConfigError(f"{address!r} in {text!r} is not an IPv6 address. Use brackets for IPv6 addresses only.")
    return _make_host(name if address is None else address, "1" if slots is None else slots)


def _make_host(name: str, slots: str) -> Host:
    check_name(name)
    if not slots.isdecimal() or int(slots) < 1:
        raise ConfigError(f"The number of slots of host {name} must be a positive integer, got {slots!r}.")
    return Host(name, int(slots))


def _require_distinct(hosts: Sequence[Host], text: str) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    if not hosts or len(set(names)) < len(names):
        problem = "lists a host twice" if hosts else "lists no host"
        raise ConfigError(f"{text!r} {problem}. Write hosts like 'host1:2,host2:2'.")
    return tuple(hosts)
