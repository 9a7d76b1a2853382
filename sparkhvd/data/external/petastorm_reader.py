"""Batches from petastorm's own reader, for users who depend on it; the native reader reads the same datasets.

petastorm assigns row group ``i`` to rank ``i % size``, so ranks have different numbers of rows. Here all ranks make as
many steps as the rank with the most rows, and ranks that have run out of rows get empty batches. petastorm's reader
threads are known to end early and lose rows without an error, so the reader runs without threads, and its rows are
counted against the Parquet footers.
"""

from __future__ import annotations

import posixpath
import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib import import_module
from itertools import islice
from typing import Any

import numpy as np

from sparkhvd._util.counts import counted
from sparkhvd.data.external import petastorm_files
from sparkhvd.data.read.batches import Batch
from sparkhvd.data.read.prefetch import StopSignal
from sparkhvd.data.schema import columns
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.data.schema.manifest import Manifest, SplitName
from sparkhvd.errors import ConfigError, DataError, SchemaError
from sparkhvd.store.protocol import Store
from sparkhvd.world import World

WORKING_SET = "petastorm==0.13.1 pyarrow==14.0.2 numpy==1.26.4 pandas==2.3.3 pyspark==4.0.5 'setuptools<70'"
WINDOW_ROWS = 16_384

_Rows = dict[str, np.ndarray[Any, Any]]


def rows_of_rank(block_rows: tuple[int, ...], rank: int, size: int) -> int:
    """Return the number of rows that petastorm assigns to a rank."""
    return sum(block_rows[rank::size])


class PetastormSource:
    """The rows of one split as one rank sees them (a ``BatchSource``), read by petastorm.

    Args:
        store: the Store that contains the files.
        manifest: the files and columns; from ``sparkhvd.data.external.parquet_files.open_existing``.
        split: ``"train"`` or ``"validation"``.
        world: this rank and the number of ranks.
        batch_size: rows of one rank in a full step.
        seed: the seed of the shuffling.
        shuffle: whether every epoch has a new order of the rank's rows, shuffled within a window.

    Raises:
        SchemaError: petastorm cannot read a column because of its name.
        DataError: petastorm cannot be imported, or the dataset has no such split.
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
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; it must be at least 1.")
        _check_names(manifest.schema)
        self._petastorm = _import()
        self._schema = manifest.schema
        self._blocks = manifest.split(split).block_rows()
        self._rank, self._size, self._batch = world.rank, world.size, batch_size
        self._seed, self._shuffle = seed, shuffle
        folders = {posixpath.dirname(file.path) for file in manifest.split(split).files}
        self._store = store
        self._folder = posixpath.join(manifest.folder, posixpath.commonpath(folders)).strip("/")

    @property
    def schema(self) -> DataSchema:
        """Return the columns of every batch."""
        return self._schema

    def steps(self) -> int:
        """Return the number of steps per epoch, the same on every rank and in every epoch."""
        most = max(rows_of_rank(self._blocks, rank, self._size) for rank in range(self._size))
        return -(-most // self._batch)

    def rows(self) -> int:
        """Return the number of rows of the split over all ranks."""
        return sum(self._blocks)

    def has_rows(self, step: int) -> bool:
        """Return whether this rank has rows in a step of every epoch."""
        return self._rows_in(step, self._rank) > 0

    def epoch(self, number: int, first_step: int = 0, stop: StopSignal | None = None) -> Iterator[Batch]:  # noqa: ARG002
        """Yield the batches of epoch ``number`` (from 0), or those from a step on.

        A stop cannot interrupt petastorm's reads.

        Raises:
            DataError: petastorm returned more or fewer rows than the files have.
        """
        wanted = rows_of_rank(self._blocks, self._rank, self._size)
        shuffled = self._shuffled(self._read() if wanted else iter(()), number)
        read = 0
        for step in range(self.steps()):
            own_rows = self._rows_in(step, self._rank)
            rows = list(islice(shuffled, own_rows))
            read += len(rows)
            if len(rows) < own_rows:
                raise self._wrong_count(read, wanted)
            if step >= first_step:
                global_rows = sum(self._rows_in(step, rank) for rank in range(self._size))
                yield Batch(self._stacked(rows), own_rows, global_rows)
        if next(shuffled, None) is not None:
            raise self._wrong_count(read + 1, wanted)

    def _rows_in(self, step: int, rank: int) -> int:
        left = rows_of_rank(self._blocks, rank, self._size) - step * self._batch
        return max(0, min(self._batch, left))

    def _wrong_count(self, read: int, wanted: int) -> DataError:
        return DataError(
            f"petastorm read {counted(read, 'row')} of {self._store.url}/{self._folder} for rank {self._rank}, but "
            f"the Parquet footers have {wanted}. Read the dataset with reader='native'."
        )

    def _shuffled(self, rows: Iterator[tuple[Any, ...]], epoch: int) -> Iterator[tuple[Any, ...]]:
        if not self._shuffle:
            yield from rows
            return
        random = np.random.default_rng([self._seed, epoch, self._rank])
        while window := list(islice(rows, WINDOW_ROWS)):
            for index in random.permutation(len(window)):
                yield window[index]

    def _read(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of this rank, with their values in the order of the schema."""
        names = columns.stored_names(self._schema)
        options = {
            "schema_fields": [f"^{re.escape(name)}$" for name in names],  # petastorm takes regular expressions
            "reader_pool_type": "dummy",
            "shuffle_row_groups": False,
            "num_epochs": 1,
            "cur_shard": self._rank,
            "shard_count": min(self._size, len(self._blocks)),  # petastorm refuses shards without a row group
            "filesystem": petastorm_files.filesystem(self._store, self._folder),
        }
        packed = any(column.codec is not None for column in self._schema.columns)
        make: Callable[..., Any] = self._petastorm.make_reader if packed else self._petastorm.make_batch_reader
        with closing(_ClosableReader(make(petastorm_files.URL, **options))) as reader:
            for record in reader.rows():
                values = [getattr(record, name) for name in names]
                if packed:
                    yield tuple(values)
                else:
                    yield from zip(*values, strict=True)

    def _stacked(self, rows: list[tuple[Any, ...]]) -> _Rows:
        return {
            column.name: _stack(column, [row[index] for row in rows])
            for index, column in enumerate(self._schema.columns)
        }


class _ClosableReader:
    """petastorm's reader with a ``close``."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def rows(self) -> Iterator[Any]:
        yield from self._reader

    def close(self) -> None:
        self._reader.stop()
        self._reader.join()


def _stack(column: ColumnSpec, values: list[Any]) -> np.ndarray[Any, Any]:
    into = columns.empty(column, len(values))
    for index, value in enumerate(values):
        array = np.asarray(value)
        if column.is_number and array.dtype != into.dtype:
            raise DataError(
                f"petastorm returned {array.dtype} for column {column.name!r}, expected {column.dtype}. Read the "
                "dataset with reader='native'."
            )
        into[index] = array.reshape(columns.row_shape(column)) if column.is_number else value
    return into


def _check_names(schema: DataSchema) -> None:
    """Refuse columns that cannot be fields of a named tuple, in which petastorm returns rows."""
    for name in columns.stored_names(schema):
        try:
            namedtuple("Row", [name])
        except ValueError as error:
            raise SchemaError(
                f"petastorm cannot read column {name!r}, because the name is not an identifier of Python, or begins "
                "with an underscore. Rename the column, or use reader='native', which reads the same files."
            ) from error


def _import() -> Any:
    try:
        return import_module("petastorm")
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"reader='petastorm' needs petastorm, which cannot be imported ({error}). It does not work with current "
            f"versions of its dependencies; these work together: {WORKING_SET}. reader='native' reads the same "
            "datasets without it."
        ) from error
