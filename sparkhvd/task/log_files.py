"""Files in a Store for the output of ranks; a rank's supervisor writes them, without the driver."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from sparkhvd.errors import StoreError
from sparkhvd.store import Store, store_at

# The size at which the buffered output of a stream is written to a file.
_PART_BYTES = 4 * 1024 * 1024
# The longest time that a line stays in the buffer.
_PART_SECONDS = 10.0


@dataclass(frozen=True)
class LogFiles:
    """A folder of a Store for the output of ranks, passed to ``run`` as ``stdout`` or ``stderr``.

    Each rank has a folder ``rank.<number>`` with files ``stdout.000000``, ``stdout.000001`` and so on. They contain the
    rank's output, without prefixes, split between lines. A new file starts every ten seconds and after 4 MiB. If the
    folder has files already, the numbers continue after them, so a retried stage of Spark replaces nothing.

    Attributes:
        store: a Store that the executors can reach, or its URL.
        folder: the folder's path in the Store.
    """

    store: Store
    folder: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "store", store_at("store", self.store))


class LogFileWriter:
    """Writes one stream of one rank to files; thread-safe.

    Args:
        files: the destination.
        rank: the rank that writes the output.
        stream: ``stdout`` or ``stderr``.
    """

    def __init__(self, files: LogFiles, rank: int, stream: str) -> None:
        self._store = files.store
        self._folder = f"{files.folder}/rank.{rank}"
        self._stream = stream
        self._changed = threading.Condition()  # guards all fields below
        self._lines: list[bytes] = []
        self._size = 0
        self._number: int | None = None
        self._closed = False
        self._error: StoreError | None = None
        self._thread = threading.Thread(target=self._run, name="sparkhvd-log-files", daemon=True)
        self._thread.start()

    def write(self, content: bytes) -> None:
        """Add whole lines; ``content`` has no newline at the end.

        Raises:
            StoreError: an earlier file could not be written. ``unwritten`` returns its lines; new ones are not added.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            self._lines.append(content + b"\n")
            self._size += len(content) + 1
            if self._size >= _PART_BYTES:
                self._write_part()  # blocks the rank, which bounds the buffer

    def close(self) -> None:
        """Write the remaining lines.

        Raises:
            StoreError: they could not be written; ``unwritten`` returns them.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def unwritten(self) -> bytes:
        """Return the lines that were added but not written to a file."""
        with self._changed:
            return b"".join(self._lines)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                self._changed.wait(_PART_SECONDS)
                self._write_part()
            self._write_part()

    def _next_number(self) -> int:
        """Return the number for the next file, after the largest in the folder; files may have been deleted from it."""
        start = f"{self._folder}/{self._stream}."
        numbers = [path.removeprefix(start) for path in self._store.list(self._folder) if path.startswith(start)]
        return max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1

    def _write_part(self) -> None:
        if not self._lines or self._error is not None:
            return
        try:
            if self._number is None:
                self._number = self._next_number()
            with self._store.open(f"{self._folder}/{self._stream}.{self._number:06d}", "wb") as file:
                file.writelines(self._lines)
        except StoreError as error:
            self._error = error
            return
        except Exception as error:  # noqa: BLE001 - a Store of the user's may raise anything
            self._error = StoreError(f"Cannot write {self._folder}: {type(error).__name__}: {error}.")
            return
        self._number += 1
        self._lines.clear()
        self._size = 0


class StoreOutput:
    """Writes the output of ranks to files, or shows it once the Store has failed; not thread-safe.

    Args:
        warn: called with a message, once for each stream that cannot be written to the Store.
        show: called with the rank, the stream and the whole lines that were not written to a file.
        most_writers: the number of streams whose writers stay open, because each of them has a thread.
    """

    def __init__(self, warn: Callable[[str], None], show: Callable[[int, str, bytes], None], most_writers: int) -> None:
        self._warn = warn
        self._show = show
        self._most_writers = most_writers
        # None after a failure. The stream that was written last comes last.
        self._writers: dict[tuple[int, str], LogFileWriter | None] = {}

    def write(self, files: LogFiles, rank: int, stream: str, content: bytes) -> None:
        """Add whole lines; ``content`` has no newline at the end."""
        key = rank, stream
        writer = self._writers.pop(key) if key in self._writers else LogFileWriter(files, rank, stream)
        self._writers[key] = writer
        if len(self._writers) > self._most_writers:
            oldest = next(iter(self._writers))
            self._finish(oldest)
            del self._writers[oldest]
        try:
            if writer is not None:
                writer.write(content)
                return
        except StoreError:
            self._finish(key)
        self._show(rank, stream, content)

    def close(self) -> None:
        """Write the remaining lines."""
        for key in self._writers:
            self._finish(key)

    def _finish(self, key: tuple[int, str]) -> None:
        writer, self._writers[key] = self._writers[key], None
        if writer is None:
            return
        try:
            writer.close()
        except StoreError as error:
            rank, stream = key
            self._warn(f"the {stream} of rank {rank} cannot be written to the Store, so it is shown here: {error}")
            if rest := writer.unwritten():
                self._show(rank, stream, rest.removesuffix(b"\n"))
