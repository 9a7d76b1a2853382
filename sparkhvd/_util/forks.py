"""Closes what a forked child inherits of the connections by which other processes notice the end of its parent.

Descriptors of sparkhvd are closed when a child executes another program. A child that does not, such as a worker of
``multiprocessing``, would keep them open after its parent was killed.
"""

from __future__ import annotations

import os
import socket
import stat
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class Inherited(Protocol):
    """An object whose connections a forked child inherits."""

    def leave_to_parent(self) -> None:
        """Close this process's copies of the connections, without ending them; called in a forked child."""


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def close_in_children(inherited: Inherited) -> None:
    """Call ``leave_to_parent`` in every process that this one forks while the object exists."""
    _inherited.add(inherited)


def close_copies(address: str, port: int) -> None:
    """Close this process's descriptors of a TCP server: its listening socket and the connections it has accepted.

    The core's thread owns these descriptors. A forked child does not have that thread.
    """
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _local_address(descriptor) == (address, port):
                os.close(descriptor)


def _local_address(descriptor: int) -> object:
    copy = socket.socket(fileno=os.dup(descriptor))
    with copy:
        return copy.getsockname()[:2] if copy.type == socket.SOCK_STREAM else None


def _leave_to_parent() -> None:
    for inherited in list(_inherited):
        with suppress(Exception):
            inherited.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
