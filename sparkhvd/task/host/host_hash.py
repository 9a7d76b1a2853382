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
    """Return the key of the machine, boot and container of this process.

    Args:
        container: distinguishes resource containers that share namespaces, such as those of YARN.
    """
    boot = _read(Path("/proc/sys/kernel/random/boot_id"))
    namespaces = [_link(Path("/proc/self/ns") / kind) for kind in _NAMESPACES]
    return hash_of([socket.gethostname(), boot, *namespaces, *([container] if container else [])])


def hash_of(parts: Sequence[str]) -> str:
    """Return a short key of ``parts``; different sequences have different keys."""
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
