"""Reading a prepared dataset: the batches of one rank, decoded ahead of their use."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sparkhvd.data import columns
from sparkhvd.data.batches import Batch
from sparkhvd.data.manifest import DataFile, Manifest, SplitName
from sparkhvd.data.plan import Piece, Plan, Window
from sparkhvd.data.schema import DataSchema
from sparkhvd.deadline import Deadline
from sparkhvd.errors import ConfigError, DataError, StoreError
from sparkhvd.store.protocol import Store
from sparkhvd.world import World

if TYPE_CHECKING:
    import pyarrow as pa

Arrays = dict[str, npt.NDArray[np.generic]]

WINDOW_BYTES = 128 * 1024 * 1024
PREFETCH_BYTES = 64 * 1024 * 1024
READ_TIMEOUT = 600.0  # seconds that a rank waits for one batch before it calls the Store stuck
_CHUNK_BYTES = 4 * 1024 * 1024
_JOIN_TIMEOUT = 60.0


class ParquetSource:
    """The rows of one split of a prepared dataset, as one rank sees them (a ``BatchSource``).

    Args:
        store: where the dataset lies.
        manifest: what it consists of.
        split: ``"train"`` or ``"validation"``.
        world: this rank and the number of ranks.
        batch_size: rows of one rank in a full step.
        seed: of the shuffling.
        shuffle: whether every epoch has an order of its own; otherwise the rows come in DataFrame order.
        steps_per_epoch: None means one pass over the rows. Fewer steps cut the pass short, more continue with
            further passes.
        prefetch_bytes: decoded bytes that may wait for the trainer (one batch may, however large).
        window_bytes: decoded bytes that may be held to shuffle them; the same on every rank.
        read_timeout: seconds to wait for one batch.

    Raises:
        ConfigError: a number is below 1.
        DataError: the dataset has no such split.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        split: SplitName,
        world: World,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        steps_per_epoch: int | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        window_bytes: int = WINDOW_BYTES,
        read_timeout: float = READ_TIMEOUT,
    ) -> None:
        if prefetch_bytes < 1:
            raise ConfigError(f"prefetch_bytes is {prefetch_bytes}; it must be at least 1.")
        self._store = store
        self._manifest = manifest
        self._split: SplitName = split
        self._rank = world.rank
        self._prefetch_bytes = prefetch_bytes
        self._read_timeout = read_timeout
        self._plan = Plan(
            block_rows=manifest.split(split).block_rows(),
            size=world.size,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            window_rows=max(1, window_bytes // columns.row_bytes(manifest.schema)),
            steps_per_epoch=steps_per_epoch,
        )

    @property
    def schema(self) -> DataSchema:
        """The columns of every batch."""
        return self._manifest.schema

    @property
    def plan(self) -> Plan:
        """The plan that the batches follow; ``plan.global_batches(epoch)`` tells the order of rows over all ranks."""
        return self._plan

    def steps(self) -> int:
        """Steps per epoch, the same on every rank and in every epoch."""
        return self._plan.steps()

    def rows(self) -> int:
        """Rows of the split over all ranks."""
        return self._plan.total_rows

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of epoch ``number`` (from 0). Closing the iterator ends the prefetching at once.

        Raises:
            DataError: a file does not hold what the manifest says.
            StoreError: a file cannot be read.
            DeadlineExceededError: no batch came within ``read_timeout``.
        """
        feed = _Feed(self._prefetch_bytes)
        thread = threading.Thread(
            target=_produce,
            args=(feed, self._batches, number),
            name=f"sparkhvd-read-{self._split}-{self._rank}",
        )
        thread.start()
        waiting_for = f"the next batch of the {self._split} rows in {self._store.url}/{self._manifest.folder}"
        try:
            for _ in range(self.steps()):
                yield feed.take(Deadline.after(self._read_timeout), waiting_for)
        finally:
            feed.close()
            thread.join(_JOIN_TIMEOUT)

    def _batches(self, number: int, stopped: Callable[[], bool]) -> Iterator[Batch]:
        with _RowStream(self._store, self._manifest, self._split, stopped) as stream:
            for window in self._plan.windows(self._rank, number):
                yield from _cut(window, stream.read(window.pieces))


def head(store: Store, manifest: Manifest, rows: int) -> Arrays:
    """The first training rows (at most ``rows``) by column, for checks on the driver."""
    pieces, left = [], rows
    for block, available in enumerate(manifest.train.block_rows()):
        if left > 0 and available:
            pieces.append(Piece(block, 0, min(left, available)))
            left -= available
    with _RowStream(store, manifest, "train", stopped=lambda: False) as stream:
        return stream.read(pieces)


def _cut(window: Window, read: Arrays) -> Iterator[Batch]:
    """The batches of a window from the rows that it reads."""
    start = 0
    for rows, global_rows in zip(window.rows, window.global_rows, strict=True):
        if window.order is None:  # such a window has one step
            yield Batch(read, rows, global_rows)
            continue
        chosen = window.order[start : start + rows]
        start += rows
        yield Batch({name: np.take(array, chosen, axis=0) for name, array in read.items()}, rows, global_rows)


class _StoppedError(Exception):
    """Nobody wants the rows any more."""


class _RowStream:
    """Decodes pieces of row groups, one after the other; going forward in a row group never decodes a row twice."""

    def __init__(self, store: Store, manifest: Manifest, split: SplitName, stopped: Callable[[], bool]) -> None:
        self._store = store
        self._folder = manifest.folder
        self._schema = manifest.schema
        self._blocks = manifest.split(split).blocks()
        self._stopped = stopped
        self._chunk_rows = min(65536, max(16, _CHUNK_BYTES // columns.row_bytes(manifest.schema)))
        self._opened = ExitStack()
        self._block = -1
        self._url = ""
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._chunk: Arrays = {}
        self._first = self._end = 0  # the rows of the block that the chunk holds

    def __enter__(self) -> _RowStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def read(self, pieces: Sequence[Piece]) -> Arrays:
        """The rows of these pieces, in their order, as arrays that the caller owns."""
        total = sum(piece.rows for piece in pieces)
        into: Arrays = {column.name: columns.empty(column, total) for column in self._schema.columns}
        at = 0
        for piece in pieces:
            self._copy(piece, into, at)
            at += piece.rows
        return into

    def _copy(self, piece: Piece, into: Arrays, at: int) -> None:
        import pyarrow as pa  # noqa: PLC0415  (heavy)

        start = piece.start
        try:
            if piece.block != self._block or start < self._first:
                self._open(piece.block)
            while start < piece.stop:
                while start >= self._end:
                    self._next_chunk()
                stop = min(piece.stop, self._end)
                for name, array in self._chunk.items():
                    into[name][at : at + stop - start] = array[start - self._first : stop - self._first]
                at += stop - start
                start = stop
        except (StoreError, DataError):
            raise
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"Cannot read {self._url}: {error}.") from error

    def _open(self, block: int) -> None:
        file, index = self._blocks[block]
        path = f"{self._folder}/{file.path}"
        self._url = f"{self._store.url}/{path}"
        self._opened.close()
        filesystem, place = self._store.arrow(path)
        opened = columns.open_parquet(self._opened.enter_context(filesystem.open_input_file(place)))
        _check_row_groups(opened.metadata, file, self._url)
        self._batches = opened.iter_batches(
            self._chunk_rows, row_groups=[index], columns=columns.stored_names(self._schema), use_threads=False
        )
        self._block, self._chunk, self._first, self._end = block, {}, 0, 0

    def _next_chunk(self) -> None:
        if self._stopped():
            raise _StoppedError
        batch = next(self._batches, None)
        if batch is None:
            raise DataError(f"{self._url} ends after {self._end} rows of a row group that should have more.")
        self._chunk = {column.name: columns.decode(batch, column, self._url) for column in self._schema.columns}
        self._first, self._end = self._end, self._end + batch.num_rows


def _check_row_groups(metadata: pa.FileMetaData, file: DataFile, url: str) -> None:
    found = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    if found != list(file.row_groups):
        raise DataError(
            f"{url} has row groups of {found} rows, the manifest says {list(file.row_groups)}; the dataset was changed "
            "after it was prepared. Prepare it again."
        )


class _Feed:
    """Batches on their way from the prefetch thread to the trainer, bounded by bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()  # guards everything below
        self._batches: deque[tuple[Batch, int]] = deque()
        self._bytes = 0
        self._closed = False
        self._ended = False
        self._error: Exception | None = None

    def put(self, batch: Batch) -> None:
        """Wait for room and add a batch; raises ``_StoppedError`` once nobody will take it."""
        size = sum(array.nbytes for array in batch.columns.values())
        with self._changed:
            while self._batches and self._bytes + size > self._limit and not self.stopped():
                # A slow trainer is no error, so this wait goes on; but it looks now and then whether there is one.
                self._changed.wait(1.0)
            if self.stopped():
                raise _StoppedError
            self._batches.append((batch, size))
            self._bytes += size
            self._changed.notify_all()

    def take(self, deadline: Deadline, waiting_for: str) -> Batch:
        """The next batch, or the error that the prefetch thread ended with."""
        with self._changed:
            while not self._batches:
                if self._error is not None:
                    raise self._error
                if self._ended:
                    raise DataError(f"The reader ended before {waiting_for}.")
                deadline.check(waiting_for)
                self._changed.wait(deadline.remaining())
            batch, size = self._batches.popleft()
            self._bytes -= size
            self._changed.notify_all()
            return batch

    def end(self, error: Exception | None) -> None:
        """Nothing more will come."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more will be taken."""
        with self._changed:
            self._closed = True
            self._batches.clear()
            self._changed.notify_all()

    def stopped(self) -> bool:
        """Whether nobody will take another batch: closed, or the interpreter is about to end without closing."""
        return self._closed or not threading.main_thread().is_alive()


def _produce(feed: _Feed, batches: Callable[[int, Callable[[], bool]], Iterator[Batch]], epoch: int) -> None:
    error: Exception | None = None
    try:
        for batch in batches(epoch, feed.stopped):
            feed.put(batch)
    except _StoppedError:
        pass
    except Exception as caught:  # noqa: BLE001  (the trainer's thread raises it)
        error = caught
    finally:
        feed.end(error)
