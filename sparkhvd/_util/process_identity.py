"""The identity of a process: its machine, process id and start time, because the system reuses process ids."""

from __future__ import annotations

import platform
from pathlib import Path


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
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
