"""Output of ranks as files in a Store, written by the rank's supervisor without the driver."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from sparkhvd.errors import StoreError
from sparkhvd.store import Store, store_at

# The size at which a rank's buffered output becomes a file; memory never holds more.
_PART_BYTES = 4 * 1024 * 1024
# The longest time that a line waits in memory for the next file.
_PART_SECONDS = 10.0


@dataclass(frozen=True)
class LogFiles:
    """A folder of a Store for the output of ranks, passed to ``run`` as ``stdout`` or ``stderr``.

    Each rank has a folder ``rank.<number>`` with files ``stdout.000000``, ``stdout.000001`` and so on. They contain its
    output, without prefixes, split between lines. A new file starts every ten seconds and after 4 MiB. In a folder with
    existing files the numbers continue, so nothing is replaced when Spark retries a stage.

    Attributes:
        store: a Store that the executors reach, or its URL.
        folder: the folder's path in the Store.
    """

    store: Store
    folder: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "store", store_at("store", self.store))


class LogFileWriter:
    """Writes one stream of one rank into files; safe for use from several threads.

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
        """Add whole lines; ``content`` lacks the last newline.

        Raises:
            StoreError: an earlier file could not be written. ``unwritten`` has its lines; the new lines are not added.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            self._lines.append(content + b"\n")
            self._size += len(content) + 1
            if self._size >= _PART_BYTES:
                self._write_part()  # blocks the rank, so that nothing piles up

    def close(self) -> None:
        """Write the remaining lines.

        Raises:
            StoreError: they could not be written; ``unwritten`` has them.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def unwritten(self) -> bytes:
        """Return the lines that were added and are in no file."""
        with self._changed:
            return b"".join(self._lines)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                self._changed.wait(_PART_SECONDS)
                self._write_part()
            self._write_part()

    def _next_number(self) -> int:
        """Return the number after the largest one in the folder, from which files may have been deleted."""
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
        self._number += 1
        self._lines.clear()
        self._size = 0


class StoreOutput:
    """Output of ranks in files until the Store fails; not thread-safe.

    Args:
        say: called once for each stream that the Store cannot store.
        show: called with the rank, the stream and the whole lines that are in no file.
    """

    def __init__(self, say: Callable[[str], None], show: Callable[[int, str, bytes], None]) -> None:
        self._say = say
        self._show = show
        self._writers: dict[tuple[int, str], LogFileWriter | None] = {}  # None after a failure

    def write(self, files: LogFiles, rank: int, stream: str, content: bytes) -> None:
        """Add whole lines; ``content`` lacks the last newline."""
        key = rank, stream
        if key not in self._writers:
            self._writers[key] = LogFileWriter(files, rank, stream)
        writer = self._writers[key]
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
            self._say(f"the Store cannot store the {stream} of rank {rank}, so it is written here: {error}")
            if rest := writer.unwritten():
                self._show(rank, stream, rest.removesuffix(b"\n"))
