"""Sends the rows of a DataFrame to the ranks without a Store.

The driver partitions the rows, one partition per rank. Each Spark task writes its partition to a local file
(``spool``), and its rank trains on that file. A shuffle delivers rows in any order, so every partition is sorted by a
seeded hash of its rows: the same rows in the same partitions, with the same seed and number of ranks, result in the
same order. Spark orders the rows of each input partition by a hash of their content and assigns them to the ranks
round-robin, so each rank has a fair sample whatever the DataFrame's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from sparkhvd._util.counts import counted
from sparkhvd.data.prepare.prepare import rows_to_write, written_schema
from sparkhvd.data.prepare.stats import (
    SIZE_PREFIX,
    ColumnFacts,
    FileFacts,
    SplitValue,
    check_rows,
    checked_schema,
    is_ranged,
    rows_of,
)
from sparkhvd.data.read.batches import Arrays
from sparkhvd.data.read.blocks import ArrowBlocks, Blocks
from sparkhvd.data.read.plan import Plan
from sparkhvd.data.read.readers import ReadOptions, RowSource
from sparkhvd.data.read.shards import OwnBlocks, Piece
from sparkhvd.data.schema import columns
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.data.schema.manifest import SplitName
from sparkhvd.data.schema.selection import RESERVED_PREFIX, Selection, source
from sparkhvd.data.spark.settings import with_own_settings
from sparkhvd.errors import ConfigError, DataError
from sparkhvd.world import World

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

# Whether Spark orders the rows of a partition by their hash before it assigns them round-robin; the default is true.
_SORTED_FIRST = "spark.sql.execution.sortBeforeRepartition"


def partition_for_ranks(df: DataFrame, selection: Selection, *, num_proc: int, seed: int) -> DataFrame:
    """Return the selected columns of ``df`` in ``num_proc`` partitions of almost equal size, each in a seeded order."""
    from pyspark.sql import functions  # noqa: PLC0415  (ranks read this package without Spark)

    if df.isStreaming:
        raise DataError("A streaming DataFrame has no end and cannot be trained on; call this from foreachBatch.")
    rows = rows_to_write(df, selection, seed)
    names = [source(column.name) for column in selection.schema.columns]
    sort_hash = functions.xxhash64(functions.lit(seed % 2**63).cast("long"), functions.lit("order"), *names)
    sent = _aliases(selection.schema)
    chosen = [source(name).alias(sent.get(name, name)) for name in rows.columns]
    return _ordered_by_hash(rows).repartition(num_proc).sortWithinPartitions(sort_hash).select(*chosen)


def _ordered_by_hash(rows: DataFrame) -> DataFrame:
    """Return the same rows in a session where ``repartition`` orders them by a hash before assigning them round-robin.

    Without that order, rows with alternating classes could leave each rank with a single class.

    Raises:
        ConfigError: the session does not order the rows, and its setting cannot be changed here.
    """
    if rows.sparkSession.conf.get(_SORTED_FIRST, "true") == "true":
        return rows
    ordered = with_own_settings(rows, {_SORTED_FIRST: "true"})
    if ordered is None:
        raise ConfigError(
            f"{_SORTED_FIRST} is false, so each rank could get rows of one class only. Set it to true for this "
            "session (it is the default), or train through a Store (data='store')."
        )
    return ordered


class TaskRows:
    """The rows that this rank's Spark task has received.

    Args:
        paths: the Arrow files, by split.
        selection: the requested columns and split.
        rank: this rank.
    """

    def __init__(self, paths: Mapping[str, str], selection: Selection, rank: int) -> None:
        self._schema = written_schema(selection.schema)
        self._rank = rank
        names = {sent: name for name, sent in _aliases(self._schema).items()}
        self._blocks = {
            split: ArrowBlocks(path, f"the {split} rows of rank {rank}", names) for split, path in paths.items()
        }

    def facts(self) -> tuple[FileFacts, ...]:
        """Return the facts about the rows, for ``checked`` on all ranks."""
        return tuple(self._facts(split, blocks) for split, blocks in self._blocks.items())

    def head(self, schema: DataSchema, rows: int) -> Arrays:
        """Return the first training rows (at most ``rows``) by column."""
        blocks = self._blocks["train"]
        batch = blocks.whole(0).slice(0, rows)
        return {column.name: columns.decode(batch, column, blocks.where) for column in schema.columns}

    def source(
        self,
        split: SplitName,
        schema: DataSchema,
        facts: Sequence[FileFacts],
        world: World,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        steps_per_epoch: int | None,
        reading: ReadOptions,
        pair_last_row: bool = False,
    ) -> RowSource:
        """Return the rows of one split as this rank sees them.

        Args:
            split: the split to read.
            schema: the result of ``checked``.
            facts: the facts of all ranks.
            world: this rank and the number of ranks.
            batch_size: rows of one rank in a full step.
            seed: the seed of the shuffling.
            shuffle: whether every epoch has its own order.
            steps_per_epoch: None means one pass over the rows.
            reading: the options for reading.
            pair_last_row: see ``Plan``.
        """
        own = self._blocks.get(split)
        counts = tuple(rows_of([one for one in facts if one.position[0] == rank], split) for rank in range(world.size))
        shards = OwnBlocks(() if own is None else _rows(own), counts)
        plan = Plan(shards, batch_size, seed, shuffle, reading.window_rows(schema), steps_per_epoch, pair_last_row)
        blocks: Blocks = _NoBlocks() if own is None else own
        return RowSource(schema, plan, world.rank, lambda: blocks, reading)

    def _facts(self, split: str, blocks: ArrowBlocks) -> FileFacts:
        batches = [blocks.whole(block) for block in range(blocks.count)]
        facts = [
            _facts_of([columns.stored(batch, column) for batch in batches], column) for column in self._schema.columns
        ]
        measures = [name for name in batches[0].schema.names if name.startswith(SIZE_PREFIX)]
        facts += [_measured(batches, name) for name in measures]
        path = f"rank {self._rank}"
        return FileFacts(path, cast("SplitValue", split), (self._rank, 0), _rows(blocks), tuple(facts))


def checked(facts: Sequence[FileFacts], selection: Selection, num_proc: int) -> DataSchema:
    """Return the schema with all shapes, from the facts of all ranks.

    Raises:
        DataError: the rows cannot be trained on; every rank raises the same error.
    """
    check_rows(facts, selection, num_proc)
    return written_schema(checked_schema(selection.schema, facts))


def _aliases(schema: DataSchema) -> dict[str, str]:
    """Return substitutes for column names with a dot or a backtick, which ``mapInArrow`` would read as syntax."""
    names = enumerate(schema.names())
    return {name: f"{RESERVED_PREFIX}renamed_{index}" for index, name in names if {".", "`"} & set(name)}


class _NoBlocks:
    """The blocks of a rank without rows in a split."""

    where = "no rows"
    fresh = False

    def location(self, block: int) -> str:  # noqa: ARG002 - there are no blocks
        return self.where

    def batches(self, piece: Piece) -> pa.RecordBatch:
        raise DataError(f"This rank has no rows of the split, but its plan covers {counted(piece.rows, 'row')}.")


def _rows(blocks: ArrowBlocks) -> tuple[int, ...]:
    return tuple(blocks.whole(block).num_rows for block in range(blocks.count))


def _facts_of(arrays: Sequence[pa.Array], column: ColumnSpec) -> ColumnFacts:
    nulls = sum(map(_nulls, arrays))
    return ColumnFacts(nulls, *_extremes(arrays)) if is_ranged(column) else ColumnFacts(nulls)


def _extremes(arrays: Sequence[pa.Array]) -> tuple[Any, Any]:
    """Return the smallest and the largest number; None if there are none."""
    import pyarrow.compute as pc  # noqa: PLC0415  (heavy)

    values = [value for array in arrays for value in pc.min_max(array).as_py().values() if value is not None]
    return min(values, default=None), max(values, default=None)


def _nulls(array: pa.Array) -> int:
    """Return the NULLs among the innermost elements."""
    import pyarrow as pa  # noqa: PLC0415  (heavy)

    while pa.types.is_list(array.type):
        array = array.flatten()
    return 0 if pa.types.is_struct(array.type) else int(array.null_count)


def _measured(batches: Sequence[pa.RecordBatch], name: str) -> ColumnFacts:
    arrays = [batch.column(name) for batch in batches]
    return ColumnFacts(sum(array.null_count for array in arrays), *_extremes(arrays))
