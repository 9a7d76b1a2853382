"""A key that is equal for tasks that may share memory."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

# Processes in different namespaces of one of these kinds cannot be relied on to reach each other's memory or sockets;
# two containers on one machine differ in at least one of them.
_NAMESPACES = ("ipc", "mnt", "net")


def host_hash(container: str = "") -> str:
    """The key of the place where this process runs: machine, boot and container.

    Args:
        container: tells resource containers apart that see the same namespaces, as those of YARN do.
    """
    boot = _read(Path("/proc/sys/kernel/random/boot_id"))
    places = [_link(Path("/proc/self/ns") / kind) for kind in _NAMESPACES]
    return hash_of([socket.gethostname(), boot, *places, *([container] if container else [])])


def hash_of(parts: Sequence[str]) -> str:
    """A short key of ``parts``; different sequences have different keys."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode()
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:16]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # not Linux, or hidden from this container


def _link(path: Path) -> str:
    try:
        return str(os.readlink(path))  # noqa: PTH115 - the target is a name like "net:[4026]", not a path
    except OSError:
        return ""
