"""Calls of a local file system, which waits forever for a disk or a server that does not answer, with a time limit."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from sparkhvd._util.background import in_background, is_done_within
from sparkhvd.errors import StoreError

T = TypeVar("T")

SILENCE_SECONDS = 300.0  # how long a call may take, in addition to the time for its transfer: NFS servers restart
BUFFER_BYTES = 1024 * 1024  # each call of a disk costs a thread
_CALL_BYTES = 32 * BUFFER_BYTES
_SLOWEST = 1e6  # bytes per second; a slower transfer counts as stalled


def ask_disk(action: str, url: str, act: Callable[[], T], size: int = 0) -> T:
    """Return the result of ``act``, called in a thread that is abandoned if the disk does not answer.

    Args:
        action: a verb for error messages.
        url: what it acts on.
        act: may raise an ``OSError``.
        size: the number of bytes that it moves.

    Raises:
        StoreError: ``act`` failed, or the disk does not answer (``is_silent``).
    """
    seconds = SILENCE_SECONDS + size / _SLOWEST
    future = in_background(act, "sparkhvd-store")
    if not is_done_within(future, seconds):
        raise StoreError(
            f"Cannot {action} {url}: its file system has not answered for {seconds:.0f} s. Check the disk, or the "
            "server that it is mounted from."
        ) from TimeoutError()
    try:
        return future.result()
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"Cannot {action} {url}: {error.strerror or error}.") from error


def is_silent(error: BaseException | None) -> bool:
    """Return whether an error says that a disk, or the server that it is mounted from, does not answer."""
    return isinstance(error, StoreError) and isinstance(error.__cause__, TimeoutError)


class DiskFile(io.FileIO):
    """An open file that does not wait forever for its disk.

    An abandoned call only uses memory of its own, because it may still end. So that this memory is small, a call reads
    or writes a part only, as ``io`` allows.
    """

    def __init__(self, path: Path, mode: str, url: str) -> None:
        super().__init__(path, mode)
        self._url = url
        self._size = os.fstat(self.fileno()).st_size  # asked here, because opening has a time limit

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[:_CALL_BYTES]
        content: bytes = ask_disk("read", self._url, partial(io.FileIO.read, self, len(view)), len(view))
        view[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        return ask_disk("read", self._url, partial(io.FileIO.readall, self), self._size)

    def write(self, content: Any) -> int:  # any object with a buffer
        own = bytes(memoryview(content).cast("B")[:_CALL_BYTES])
        return ask_disk("write", self._url, partial(io.FileIO.write, self, own), len(own))

    def close(self) -> None:
        if not self.closed:
            ask_disk("close", self._url, partial(io.FileIO.close, self))


def open_to_read(path: Path, url: str) -> BinaryIO:
    """Open a file; ``url`` names it in error messages."""
    return io.BufferedReader(ask_disk("open", url, lambda: DiskFile(path, "rb", url)), BUFFER_BYTES)
