"""Files of a remote Store: read by ranges, written as a whole."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import IO, Any, Protocol

from sparkhvd.errors import StoreError

# Content up to this size is buffered in memory, larger content in an unnamed temporary file.
SPOOL_BYTES = 32 * 1024 * 1024
# The buffer size of a reader, so that not every small read is a request.
READ_AHEAD_BYTES = 1024 * 1024


class Ranges(Protocol):
    """An open file of a file system."""

    @property
    def size(self) -> int:
        """Return the size of the file in bytes."""

    @property
    def info(self) -> Mapping[str, Any] | None:
        """Return fsspec's facts about the file at the time of opening it; None if opening did not require them."""

    def read(self, start: int, stop: int) -> bytes:
        """Return exactly the bytes from ``start`` to ``stop``, which must lie inside the file."""


class RangeReader(io.RawIOBase):
    """A seekable, read-only file over ``Ranges``. A read returns all requested bytes that the file has, or raises."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._position = 0

    @property
    def size(self) -> int:
        """Return the size of the file in bytes."""
        return self._ranges.size

    @property
    def info(self) -> Mapping[str, Any] | None:
        """See ``Ranges.info``."""
        return self._ranges.info

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._ranges.size}[whence]
        if start + offset < 0:
            raise ValueError(f"A position in a file must be at least 0, got {start + offset}.")
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = self._ranges.size if size is None or size < 0 else min(self._ranges.size, self._position + size)
        if stop <= self._position:
            return b""
        content = self._ranges.read(self._position, stop)
        self._position = stop
        return content

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # io's own type is not public
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


class SpooledFile(io.RawIOBase):
    """A new file with a local buffer. ``close`` passes the content to ``commit``; an error in ``with`` discards it.

    Because of the buffer, a retry can send the content again, and a killed writer leaves no partial file.
    """

    def __init__(self, url: str, commit: Callable[[IO[bytes], int], None]) -> None:
        self._url = url
        self._commit = commit
        # The file has no name, so the kernel removes it when the process ends.
        self._spool = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115
        self._dropped = False

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:  # any object with a buffer
        with self._reporting_full_disk():
            return self._spool.write(content)

    def tell(self) -> int:
        return self._spool.tell()

    def close(self) -> None:
        if self.closed:
            return
        try:
            if not self._dropped:
                size = self._spool.tell()
                with self._reporting_full_disk():
                    self._spool.seek(0)  # writes the end of the content to the disk
                self._commit(self._spool, size)
        finally:
            with suppress(OSError):  # of content that is dropped
                self._spool.close()
            super().close()

    @contextmanager
    def _reporting_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"Cannot buffer the content of {self._url} in {tempfile.gettempdir()}: {error.strerror or error}. Free "
                "space there, or set TMPDIR to another folder."
            ) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._dropped = kind is not None
        self.close()

    def __del__(self) -> None:
        # io's own finalizer would call close(), which would publish the half-written content of an abandoned file.
        self._dropped = True
        with suppress(AttributeError, OSError):
            self._spool.close()
