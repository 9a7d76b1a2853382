"""The connection of one process to the file system of a Store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class Connection:
    """A lazily created file system; copies and forked processes create their own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # guards the fields below, and operations that only one thread may run at a time
        self._filesystem: AbstractFileSystem | None = None
        self._process = 0

    def get(self, make: Callable[[], AbstractFileSystem]) -> AbstractFileSystem:
        """Return the file system, created by ``make`` on first use."""
        with self.lock:
            if self._filesystem is None or self._process != os.getpid():
                self._filesystem = make()
                self._process = os.getpid()
            return self._filesystem

    def close(self) -> None:
        """Drop the file system; the next ``get`` creates another one."""
        with self.lock:
            self._filesystem = None

    def abandon(self) -> None:
        """Drop a file system with a hanging thread, together with the lock that the thread may hold."""
        self.lock = threading.RLock()
        self.close()

    def __reduce__(self) -> tuple[type[Connection], tuple[()]]:
        return Connection, ()
