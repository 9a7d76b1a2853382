"""Rows that go from a DataFrame to the ranks without a Store.

The driver deals the rows out, one partition per rank. Each Spark task writes its partition to a local file
(``spool``), and its rank trains on that. A shuffle delivers rows in any order, so every partition is
sorted by a seeded hash of its rows: the same rows in the same partitions, seed and number of ranks give the same order.
Which rank gets a row depends on the partition that it comes from: the rows of a partition, ordered by a hash of their
content, are assigned to the ranks in turn, so each rank has a fair sample whatever the DataFrame's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from sparkhvd.data.prepare.prepare import as_written, prepared
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
from sparkhvd.data.read.readers import Reading, RowSource
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

# Whether Spark orders the rows of a partition by their hash before it assigns them in turn; true by default.
_SORTED_FIRST = "spark.sql.execution.sortBeforeRepartition"


def dealt(df: DataFrame, selection: Selection, *, num_proc: int, seed: int) -> DataFrame:
    """The selected columns of ``df`` in ``num_proc`` partitions of almost equal size, each in its seeded order."""
    from pyspark.sql import functions  # noqa: PLC0415  (ranks read this package without Spark)

    if df.isStreaming:
        raise DataError("A streaming DataFrame has no end and cannot be trained on; call this from foreachBatch.")
    rows = prepared(df, selection, seed)
    names = [source(column.name) for column in selection.schema.columns]
    place = functions.xxhash64(functions.lit(seed % 2**63).cast("long"), functions.lit("order"), *names)
    sent = _sent(selection.schema)
    chosen = [source(name).alias(sent.get(name, name)) for name in rows.columns]
    return _ordered_by_hash(rows).repartition(num_proc).sortWithinPartitions(place).select(*chosen)


def _ordered_by_hash(rows: DataFrame) -> DataFrame:
    """The same rows, which ``repartition`` orders by a hash before it assigns them in turn.

    Otherwise rows whose classes alternate would give each rank one class.

    Raises:
        ConfigError: the session does not order them, and its setting cannot be changed here.
    """
    if rows.sparkSession.conf.get(_SORTED_FIRST, "true") == "true":
        return rows
    found = with_own_settings(rows, {_SORTED_FIRST: "true"})
    if found is None:
        raise ConfigError(
            f"{_SORTED_FIRST} is false, so each rank could get rows of one class only. Set it to true for this "
            "session (it is the default), or train through a Store (data='store')."
        )
    return found


class GivenRows:
    """The rows that this rank's task was given.

    Args:
        paths: the Arrow files, by split.
        selection: what was asked for.
        rank: this rank.
    """

    def __init__(self, paths: Mapping[str, str], selection: Selection, rank: int) -> None:
        self._schema = as_written(selection.schema)
        self._rank = rank
        names = {sent: name for name, sent in _sent(self._schema).items()}
        self._blocks = {
            split: ArrowBlocks(path, f"the {split} rows of rank {rank}", names) for split, path in paths.items()
        }

    def facts(self) -> tuple[FileFacts, ...]:
        """What there is to know about them, for ``checked`` on all ranks."""
        return tuple(self._facts(split, blocks) for split, blocks in self._blocks.items())

    def head(self, schema: DataSchema, rows: int) -> Arrays:
        """At most so many of the first training rows by column."""
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
        reading: Reading,
        pair_last_row: bool = False,
    ) -> RowSource:
        """The rows of one split as this rank sees them.

        Args:
            split: which rows.
            schema: from ``checked``.
            facts: of all ranks.
            world: this rank and the number of ranks.
            batch_size: rows of one rank in a full step.
            seed: of the shuffling.
            shuffle: whether every epoch has an order of its own.
            steps_per_epoch: None means one pass over the rows.
            reading: how to read.
            pair_last_row: see ``Plan``.
        """
        own = self._blocks.get(split)
        counts = tuple(rows_of([one for one in facts if one.place[0] == rank], split) for rank in range(world.size))
        shards = OwnBlocks(() if own is None else _rows(own), counts)
        plan = Plan(shards, batch_size, seed, shuffle, reading.window_rows(schema), steps_per_epoch, pair_last_row)
        blocks: Blocks = _Nothing() if own is None else own
        return RowSource(schema, plan, world.rank, lambda: blocks, reading)

    def _facts(self, split: str, blocks: ArrowBlocks) -> FileFacts:
        batches = [blocks.whole(block) for block in range(blocks.count)]
        found = [
            _facts_of([columns.stored(batch, column) for batch in batches], column) for column in self._schema.columns
        ]
        measures = [name for name in batches[0].schema.names if name.startswith(SIZE_PREFIX)]
        found += [_measured(batches, name) for name in measures]
        path = f"rank {self._rank}"
        return FileFacts(path, cast("SplitValue", split), (self._rank, 0), _rows(blocks), tuple(found))


def checked(facts: Sequence[FileFacts], selection: Selection, num_proc: int) -> DataSchema:
    """The schema with all shapes, from the facts of all ranks.

    Raises:
        DataError: these rows cannot be trained on; raised on every rank alike.
    """
    check_rows(facts, selection, num_proc)
    return as_written(checked_schema(selection.schema, facts))


def _sent(schema: DataSchema) -> dict[str, str]:
    """Other names for columns with a dot in theirs, which ``mapInArrow`` would take for that of a field."""
    return {name: f"{RESERVED_PREFIX}dotted_{place}" for place, name in enumerate(schema.names()) if "." in name}


class _Nothing:
    """The blocks of a rank that was given no rows of a split."""

    where = "no rows"
    fresh = False

    def batches(self, piece: Piece) -> pa.RecordBatch:
        raise DataError(f"This rank has no rows of the split, but {piece.rows} rows were requested.")


def _rows(blocks: ArrowBlocks) -> tuple[int, ...]:
    return tuple(blocks.whole(block).num_rows for block in range(blocks.count))


def _facts_of(arrays: Sequence[pa.Array], column: ColumnSpec) -> ColumnFacts:
    nulls = sum(map(_nulls, arrays))
    return ColumnFacts(nulls, *_ends(arrays)) if is_ranged(column) else ColumnFacts(nulls)


def _ends(arrays: Sequence[pa.Array]) -> tuple[Any, Any]:
    """The smallest and the largest number; None where there are none."""
    import pyarrow.compute as pc  # noqa: PLC0415  (heavy)

    values = [value for array in arrays for value in pc.min_max(array).as_py().values() if value is not None]
    return min(values, default=None), max(values, default=None)


def _nulls(array: pa.Array) -> int:
    """The NULLs among the innermost elements."""
    import pyarrow as pa  # noqa: PLC0415  (heavy)

    while pa.types.is_list(array.type):
        array = array.flatten()
    return 0 if pa.types.is_struct(array.type) else int(array.null_count)


def _measured(batches: Sequence[pa.RecordBatch], name: str) -> ColumnFacts:
    arrays = [batch.column(name) for batch in batches]
    return ColumnFacts(sum(array.null_count for array in arrays), *_ends(arrays))
