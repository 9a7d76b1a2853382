"""Reads the batches of one rank; threads decode and prefetch them.

Some threads decode the pieces of the plan. Another thread assembles windows, has further threads shuffle them, and cuts
them into batches. A batch is a view of its window's memory where possible, so most rows are copied once or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sparkhvd._util.counts import counted
from sparkhvd.config import local_folders
from sparkhvd.data.read import cache
from sparkhvd.data.read.batches import Arrays, Batch
from sparkhvd.data.read.blocks import Blocks, FileVersion, ParquetBlocks
from sparkhvd.data.read.plan import Plan, Window
from sparkhvd.data.read.prefetch import Job as PrefetchJob
from sparkhvd.data.read.prefetch import Prefetcher, StopSignal
from sparkhvd.data.read.row_stream import RowStream
from sparkhvd.data.read.shards import Piece, SharedBlocks
from sparkhvd.data.read.shuffle import shuffle_rows
from sparkhvd.data.schema import columns
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.data.schema.manifest import Manifest, SplitName
from sparkhvd.errors import ConfigError, DataError
from sparkhvd.store.protocol import Store
from sparkhvd.world import World

if TYPE_CHECKING:
    import pyarrow as pa

Transformation = Callable[[Arrays], Arrays]

PREFETCH_BYTES = 256 * 1024 * 1024
READ_TIMEOUT = 600.0  # seconds that a rank waits for one batch before it reports that the Store is stuck
THREADS = 2
_CHUNK_BYTES = 8 * 1024 * 1024
# Larger windows shuffle no better, and the permutation takes memory, too.
_WINDOW_ROWS = 1024 * 1024
# Batches pass between threads in groups of this many bytes, because every hand-over costs both threads time.
_GROUP_BYTES = 1024 * 1024


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading rows from any source.

    Attributes:
        prefetch_bytes: decoded bytes that a rank holds, including those that the trainer uses. A quarter is for
            prefetched rows. The rest is for three windows, within which rows are shuffled: one is being assembled, one
            waits, and one is in use.
        window_bytes: the size of a window, the same on every rank; None means a quarter of ``prefetch_bytes``, at most
            1,048,576 rows.
        threads: the number of threads that decode rows; as many other threads shuffle columns.
        timeout: seconds to wait for one batch.
        transformation: converts the columns of a batch to other columns with as many rows; called by a reader thread.
        made: the columns that the transformation returns, if they are known. Batches without rows get these columns,
            because the transformation is not called for such batches.
        cache: ``memory`` or ``disk`` caches this rank's rows after the first read; the rank then has the same rows in
            every epoch, unless all rows fit into one window.
        cache_folder: the folder for files of the cache; empty means the first of Spark's local folders that can be
            written to.
    """

    prefetch_bytes: int = PREFETCH_BYTES
    window_bytes: int | None = None
    threads: int = THREADS
    timeout: float = READ_TIMEOUT
    transformation: Transformation | None = None
    made: DataSchema | None = None
    cache: str | None = None
    cache_folder: str = ""

    def __post_init__(self) -> None:
        for name in ("prefetch_bytes", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.cache not in {None, "memory", "disk"}:
            raise ConfigError(f"Unknown cache={self.cache!r}; expected one of 'memory', 'disk' and None.")

    def window_rows(self, schema: DataSchema) -> int:
        """Return the number of rows in a window."""
        row = columns.row_bytes(schema)
        if self.window_bytes is not None:
            return max(1, self.window_bytes // row)
        return max(1, min(self.prefetch_bytes // 4 // row, _WINDOW_ROWS))


class RowSource:
    """The rows of one split, as one rank sees them (a ``BatchSource``).

    Args:
        schema: the columns.
        plan: the order of the rows.
        rank: the rank whose rows to read.
        blocks: opens the source of the rows; called once per epoch.
        reading: the options for reading.
    """

    def __init__(
        self, schema: DataSchema, plan: Plan, rank: int, blocks: Callable[[], Blocks], reading: ReadOptions
    ) -> None:
        self._schema = schema
        self._plan = plan
        self._rank = rank
        self._open = blocks
        self._reading = reading

    @property
    def schema(self) -> DataSchema:
        """Return the columns of every batch; before transformation if its result is unknown."""
        return self._reading.made or self._schema

    @property
    def plan(self) -> Plan:
        """Return the plan of the batches; ``plan.global_batches(epoch)`` yields the order of rows over all ranks."""
        return self._plan

    @cached_property
    def sample(self) -> Arrays:
        """Return a row with the columns of a batch.

        The row is synthetic, but a ``ParquetSource`` with a transformation transforms its real first row.
        """
        function = self._reading.transformation
        if function is None:
            return self._first_row()
        return {name: np.asarray(array) for name, array in function(self._first_row()).items()}

    def _first_row(self) -> Arrays:
        return {column.name: columns.blank(column, 1) for column in self._schema.columns}

    def _empty_arrays(self) -> Arrays:
        """Return the columns of a batch without rows."""
        if self._reading.transformation is not None and self._reading.made is None:
            return {name: array[:0].copy() for name, array in self.sample.items()}
        return columns.no_rows(self.schema)

    def steps(self) -> int:
        """Return the number of steps per epoch, the same on every rank and in every epoch."""
        return self._plan.steps()

    def division_of(self, epoch: int) -> Plan:  # noqa: ARG002 - the same in every epoch
        """Return the division of an epoch's rows into the batches of ranks."""
        return self._plan

    def rows(self) -> int:
        """Return the number of rows of the split over all ranks."""
        return self._plan.total_rows

    def has_rows(self, step: int) -> bool:
        """Return whether this rank has rows in a step of every epoch."""
        return self._plan.rows_in(self._rank, step) > 0

    def epoch(self, number: int, first_step: int = 0, stop: StopSignal | None = None) -> Iterator[Batch]:
        """Return the batches of epoch ``number`` (from 0). Closing the iterator ends the prefetching at once.

        Args:
            number: the epoch.
            first_step: the step to begin at; the batches are the same as in the whole epoch.
            stop: ends the epoch from another thread.

        Raises:
            DataError: the rows differ from the manifest, or a transformation changed their number.
            StoreError: a file cannot be read.
            DeadlineExceededError: no batch arrived within the timeout.
            StoppedError: another thread stopped the epoch.
        """
        if not 0 <= first_step <= self.steps():
            raise ConfigError(
                f"first_step is {first_step}; it must be from 0 to {self.steps()}, the steps of an epoch."
            )
        return self._epoch(number, first_step, stop or StopSignal())

    def _epoch(self, number: int, first_step: int, stop: StopSignal) -> Iterator[Batch]:
        blocks = self._open()
        reading, name = self._reading, f"sparkhvd-read-{self._rank}"
        decode = partial(_decoded, blocks, self._schema)
        jobs: Iterator[PrefetchJob[Arrays]] = (
            partial(decode, piece) for piece in self._plan.pieces(self._rank, number, first_step)
        )
        share = max(1, reading.prefetch_bytes // 4)
        wait_for = f"the next rows of {blocks.where}"
        chunks = Prefetcher(
            jobs, limit=share, threads=reading.threads, name=name, timeout=reading.timeout, waiting_for=wait_for
        )
        try:
            windows = self._plan.windows(self._rank, number, first_step)
            cut = partial(_groups, windows, chunks, self._schema, reading, self._empty_arrays)
            groups = Prefetcher(
                [cut], limit=share, threads=1, name=name, timeout=reading.timeout + 1.0, waiting_for=wait_for
            )
            try:
                with stop.calling(groups.stop):
                    for group in groups:
                        yield from group
            finally:
                chunks.stop()  # the thread of the groups may wait for a chunk
                groups.stop()
                groups.join()
        finally:
            chunks.stop()
            chunks.join()


class ParquetSource(RowSource):
    """The rows of one split of a prepared dataset, as one rank sees them.

    Args:
        store: the Store that contains the dataset.
        manifest: the files and columns of the dataset.
        split: ``"train"`` or ``"validation"``.
        world: this rank and the number of ranks.
        batch_size: rows of one rank in a full step.
        seed: the seed of the shuffling.
        shuffle: whether every epoch has its own order; otherwise a rank's rows come in dataset order.
        steps_per_epoch: None means one pass over the rows. Fewer steps cut the pass short; more steps continue with
            further passes.
        reading: the options for reading.
        pair_last_row: see ``Plan``.

    Raises:
        ConfigError: ``batch_size`` or ``steps_per_epoch`` is below 1, or the split has no rows.
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
        reading: ReadOptions | None = None,
        pair_last_row: bool = False,
    ) -> None:
        reading = ReadOptions() if reading is None else reading
        files, schema = manifest.split(split), manifest.schema
        shards = SharedBlocks(files.block_rows(), world.size, keep=reading.cache is not None)
        plan = Plan(shards, batch_size, seed, shuffle, reading.window_rows(schema), steps_per_epoch, pair_last_row)
        kept: dict[Piece, Sequence[pa.RecordBatch]] = {}
        versions: dict[str, FileVersion] = {}
        # Rows that every rank reads fit into one window, so they are cached in memory: decoding all of them once costs
        # less than decoding a shard in every epoch.
        cache_kind = reading.cache or ("memory" if plan.read_by_all else None)

        def blocks() -> Blocks:
            chunk_rows = _chunk_rows(schema)
            parquet_blocks = ParquetBlocks(store, manifest.folder, files, schema, chunk_rows, versions=versions)
            if cache_kind is None:
                return parquet_blocks
            folders = (reading.cache_folder,) if reading.cache_folder else local_folders()
            keep = cache.in_memory if cache_kind == "memory" else cache.on_disk(folders)
            return cache.CachedBlocks(parquet_blocks, plan.shard(world.rank), keep, kept)

        super().__init__(schema, plan, world.rank, blocks, reading)
        self._head = partial(head, store, manifest, 1, split)

    def _first_row(self) -> Arrays:
        return super()._first_row() if self._reading.transformation is None else self._head()


def head(store: Store, manifest: Manifest, rows: int, of: SplitName = "train") -> Arrays:
    """Return the first rows (at most ``rows``) of a split by column."""
    schema, split = manifest.schema, manifest.split(of)
    blocks = ParquetBlocks(store, manifest.folder, split, schema, rows)
    parts: list[Arrays] = []
    for block, available in enumerate(split.block_rows()):
        if rows > 0 and available:
            piece = Piece(block, 0, min(rows, available))
            parts += [chunk for chunk, _ in _decoded(blocks, schema, piece)]
            rows -= piece.rows
    return _joined_parts(parts, schema)


def _chunk_rows(schema: DataSchema) -> int:
    return min(1 << 20, max(16, _CHUNK_BYTES // columns.row_bytes(schema)))


def _decoded(blocks: Blocks, schema: DataSchema, piece: Piece) -> Iterator[tuple[Arrays, int]]:
    where = blocks.location(piece.block)
    for batch in blocks.batches(piece):
        arrays = {column.name: columns.decode(batch, column, where) for column in schema.columns}
        if blocks.fresh:
            arrays = {name: _owned(array) for name, array in arrays.items()}
        yield arrays, sum(array.nbytes for array in arrays.values())


class _Memory:
    """Presents the memory of an array to numpy as writable."""

    def __init__(self, array: npt.NDArray[np.generic]) -> None:
        self.owner = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _owned(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return the same memory as a writable array, because Arrow marks even newly decoded arrays as read-only."""
    if array.flags.writeable or not array.flags.c_contiguous or array.dtype.hasobject or array.dtype.kind in "Mm":
        return array
    return np.asarray(_Memory(array))


def _groups(
    windows: Iterator[Window],
    chunks: Prefetcher[Arrays],
    schema: DataSchema,
    reading: ReadOptions,
    empty_arrays: Callable[[], Arrays],
) -> Iterator[tuple[list[Batch], int]]:
    """Yield the batches of all windows in groups, with the bytes of each group."""
    rows = RowStream(iter(chunks))
    row_bytes = columns.row_bytes(schema)
    transformation = reading.transformation
    group: list[Batch] = []
    size = 0
    with ThreadPoolExecutor(reading.threads, thread_name_prefix="sparkhvd-mix") as threads:
        for batch in chain.from_iterable(_batches_of(window, rows, schema, threads) for window in windows):
            if transformation is None:
                group.append(batch)
                size += batch.rows * row_bytes
            else:
                transformed = (
                    _transformed(batch, transformation) if batch.rows else replace(batch, columns=empty_arrays())
                )
                group.append(transformed)
                size += sum(array.nbytes for array in group[-1].columns.values())
            if size >= _GROUP_BYTES:
                yield group, size
                group, size = [], 0
    if group:
        yield group, size


def _batches_of(window: Window, rows: RowStream, schema: DataSchema, threads: Executor) -> Iterator[Batch]:
    """Yield the batches of a window, which takes its rows from ``rows``."""
    if window.order is None:
        for count, global_rows in zip(window.rows, window.global_rows, strict=True):
            yield Batch(_writable(list(rows.parts(count)), schema), count, global_rows)
        return
    parts = list(rows.parts(sum(piece.rows for piece in window.pieces)))
    ends = np.cumsum([0, *window.rows])
    for first in range(0, len(window.rows), window.portion):
        last = min(first + window.portion, len(window.rows))
        order = window.order[ends[first] : ends[last]]
        shuffled = shuffle_rows(parts, order, schema, threads, release=last == len(window.rows))
        bounds = (ends[first : last + 1] - ends[first]).tolist()
        for (start, stop), global_rows in zip(pairwise(bounds), window.global_rows[first:last], strict=True):
            yield Batch({name: array[start:stop] for name, array in shuffled.items()}, stop - start, global_rows)


def _writable(parts: list[Arrays], schema: DataSchema) -> Arrays:
    if len(parts) != 1:
        return _joined_parts(parts, schema)
    return {name: array if array.flags.writeable else array.copy() for name, array in parts[0].items()}


def _joined_parts(parts: list[Arrays], schema: DataSchema) -> Arrays:
    """Return the concatenated parts as new arrays."""
    return {
        column.name: np.array(
            _concatenated([part[column.name] for part in parts], column.name, schema), copy=len(parts) == 1
        )
        for column in schema.columns
    }


def _concatenated(parts: list[npt.NDArray[np.generic]], name: str, schema: DataSchema) -> npt.NDArray[np.generic]:
    if not parts:
        return columns.empty(schema[name], 0)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _transformed(batch: Batch, transformation: Transformation) -> Batch:
    transformed = transformation(batch.columns)
    for name, array in transformed.items():
        if len(array) != batch.rows:
            raise DataError(
                f"transformation_fn returned {counted(len(array), 'row')} of column {name!r} for a batch of "
                f"{counted(batch.rows, 'row')}; it must keep the number of rows."
            )
    return Batch(
        {name: np.ascontiguousarray(array) for name, array in transformed.items()}, batch.rows, batch.global_rows
    )
