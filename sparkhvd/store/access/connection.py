"""The connection of one process to the file system of a Store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class Connection:
    """Makes a file system when it is first asked for and keeps it; a copy, and a forked process, make their own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # guards the fields below, and what only one thread may do at a time
        self._filesystem: AbstractFileSystem | None = None
        self._process = 0

    def get(self, make: Callable[[], AbstractFileSystem]) -> AbstractFileSystem:
        """The file system, made by ``make`` where there is none yet."""
        with self.lock:
            if self._filesystem is None or self._process != os.getpid():
                self._filesystem = make()
                self._process = os.getpid()
            return self._filesystem

    def close(self) -> None:
        """Let go of the file system; the next ``get`` makes another one."""
        with self.lock:
            self._filesystem = None

    def abandon(self) -> None:
        """Let go of the file system that a thread hangs in, which may hold the lock for ever."""
        self.lock = threading.RLock()
        self.close()

    def __reduce__(self) -> tuple[type[Connection], tuple[()]]:
        return Connection, ()
