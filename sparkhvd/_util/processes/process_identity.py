"""The identity of a process: its machine, process id and start time, because the system reuses process ids."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_PROCESSES = Path("/proc")


@dataclass(frozen=True)
class ProcessOnMachine:
    """A process on any machine.

    Attributes:
        machine: its ``machine_id``.
        pid: its process id.
        started: its ``process_start``.
    """

    machine: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> Self:
        """Return the identity of this process."""
        return cls(machine_id(), os.getpid(), process_start(os.getpid()))

    def is_on_this_machine(self) -> bool:
        """Return whether this machine can know whether the process runs."""
        return self.machine == machine_id()

    def has_ended(self) -> bool:
        """Return whether the process has ended, as far as this machine can know; False for other machines."""
        return self.is_on_this_machine() and not is_running(self.pid, self.started)


def machine_id() -> str:
    """Return the identity of this machine and container, within which process ids are unique."""
    parts = [platform.node()]
    for source in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            path = Path(source)
            parts.append(str(path.readlink()) if path.is_symlink() else path.read_text().strip())
        except OSError:
            continue
    return "/".join(parts)


def process_start(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; empty when it has ended."""
    try:
        state, start = state_and_start(pid)
    except OSError:
        return ""
    return "" if state == "Z" else start


def is_running(pid: int, start: str) -> bool:
    """Return whether the process that began at ``start``, as ``process_start`` returned it, still runs.

    If ``/proc`` hides processes of other users (``hidepid``), any such process with this id counts.
    """
    try:
        state, found = state_and_start(pid)
    except OSError:
        return _belongs_to_another_user(pid)
    return state != "Z" and found == start


def state_and_start(pid: int) -> tuple[str, str]:
    """Return the kernel's letter for the state of a process, and its start time in clock ticks since boot.

    Raises:
        OSError: it has ended, or ``/proc`` hides it.
    """
    # The kernel cuts the name of the process after 15 bytes, so it may end within a character.
    fields = (_PROCESSES / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]


def _belongs_to_another_user(pid: int) -> bool:
    """Return whether a process exists that this user may not signal."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False
