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


_ALL_ADDRESSES = frozenset({"0.0.0.0", "::"})  # noqa: S104

_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def close_in_children(inherited: Inherited) -> None:
    """Call ``leave_to_parent`` in every process that this one forks until ``keep_in_children``."""
    _inherited.add(inherited)


def keep_in_children(inherited: Inherited) -> None:
    """Undo ``close_in_children``: the object is closed, and other sockets may take its port."""
    _inherited.discard(inherited)


def close_copies(address: str, port: int) -> None:
    """Close this process's descriptors of a TCP server: its listening socket and the connections it has accepted.

    The core's thread owns these descriptors. A forked child does not have that thread.
    """
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _is_local(descriptor, address, port):
                os.close(descriptor)


def _is_local(descriptor: int, address: str, port: int) -> bool:
    """Return whether a socket has a local address; a server that listens on all addresses accepts on each of them."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.type != socket.SOCK_STREAM or copy.family not in {socket.AF_INET, socket.AF_INET6}:
            return False
        own: tuple[str, int] = copy.getsockname()[:2]
    return own[1] == port and (address in _ALL_ADDRESSES or own[0] == address)


def _leave_to_parent() -> None:
    seconds = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # it would make sockets non-blocking that this process shares with its parent
    for inherited in list(_inherited):
        with suppress(Exception):
            inherited.leave_to_parent()
    _inherited.clear()
    socket.setdefaulttimeout(seconds)


os.register_at_fork(after_in_child=_leave_to_parent)
