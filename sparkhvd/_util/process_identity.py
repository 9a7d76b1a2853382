"""What a process is known by beside its number, which the system uses again: its machine, and when it started."""

from __future__ import annotations

import platform
from pathlib import Path


def machine_id() -> str:
    """This machine and, inside a container, the container: what a pid means something in."""
    parts = [platform.node()]
    for source in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            place = Path(source)
            parts.append(str(place.readlink()) if place.is_symlink() else place.read_text().strip())
        except OSError:
            continue
    return "/".join(parts)


def process_start(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
