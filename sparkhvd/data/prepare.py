"""From a DataFrame to a prepared dataset, in one evaluation of its lineage.

Spark writes the Parquet files of both splits at once, without a shuffle. Everything else that has to be known (row
counts, NULLs, the lengths of arrays) is in the footers of these files. So that they tell the lengths too, every array
column is accompanied by a column of its sizes: the readers never touch it, and the footer has its minimum and maximum.

Two splits in one write means dynamic partitioning, for which Spark sorts every task's rows by split, and a sort that
spills to disk does not keep the order of equal rows. The rows are therefore sorted by (split, row number), which
satisfies Spark and keeps the DataFrame's order. (The setting that avoids the sort,
spark.sql.maxConcurrentOutputFileWriters, belongs to the user's session and cannot be given to one write.)
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sparkhvd.data.facts import ColumnFacts, FileFacts, SplitValue, check_rows, checked_schema, size_columns
from sparkhvd.data.manifest import DataFile, Manifest, Split
from sparkhvd.data.schema import ColumnSpec, DataSchema
from sparkhvd.data.selection import RESERVED_PREFIX, Selection, expressions, source
from sparkhvd.errors import ConfigError, DataError, SparkHvdError
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

logger = logging.getLogger(__name__)

# Small enough that a rank reads little more than its shard and that windows mix many row groups, large enough for
# sequential reading.
ROW_GROUP_BYTES = 16 * 1024 * 1024

_SPLIT = RESERVED_PREFIX + "split"
_ROW = RESERVED_PREFIX + "row"
# Spark names files by task and by their number within the task; tasks are in DataFrame order.
_PART = re.compile(r"part-(\d+)-.*[.-]c(\d+)\.(?:\w+\.)?parquet")


def prepare(df: DataFrame, selection: Selection, store: Store, *, num_proc: int, seed: int) -> Manifest:
    """Write the selected columns of ``df`` to ``store`` as a new dataset.

    The lineage of ``df`` is evaluated once. The dataset has an id of its own, is never changed, and becomes visible
    when its manifest is published as the last step; a failure leaves nothing behind.

    Args:
        df: the rows; their order is kept.
        selection: what ``select(df.schema, ...)`` returned.
        store: where the dataset goes.
        num_proc: the number of ranks that will train.
        seed: decides which rows a validation fraction holds out: a hash of the row's content and the seed, whatever
            the partitioning. Equal rows fall on the same side.

    Returns:
        The manifest as published, with all shapes known.

    Raises:
        DataError: NULL in a column or an array, no rows, no training rows, fewer training rows than ``num_proc``, no
            validation rows though some were asked for, or a validation column with other values than 0 and 1.
        SchemaError: an array or vector column has rows of different lengths, or of length 0.
        StoreError: the Store could not be written or read.
    """
    if num_proc < 1:
        raise ConfigError(f"num_proc is {num_proc}; it must be at least 1.")
    if df.isStreaming:
        raise DataError("A streaming DataFrame has no end and cannot be prepared; call this from foreachBatch.")
    dataset_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:16]}"
    try:
        _write(df, selection, store.spark_url(layout.dataset_rows_folder(dataset_id)), seed)
        files = _read_footers(store, dataset_id, selection.schema)
        check_rows(
            files,
            selection,
            num_proc,
            f" (nothing was written to {store.url}). If it should have, check that the driver and all executors share "
            "this folder",
        )
        manifest = Manifest(
            dataset_id=dataset_id,
            folder=layout.dataset_folder(dataset_id),
            schema=checked_schema(selection.schema, files),
            train=_split(files, "train"),
            validation=None if selection.validation is None else _split(files, "validation"),
            seed=seed,
            validated_by=selection.validation,
        )
        store.publish(layout.manifest_path(dataset_id), manifest.to_json())
    except BaseException:
        _remove(store, layout.dataset_folder(dataset_id))
        raise
    held_out = 0 if manifest.validation is None else manifest.validation.rows
    logger.info("Prepared dataset %s: %d rows to train on, %d held out", dataset_id, manifest.train.rows, held_out)
    return manifest


def _remove(store: Store, folder: str) -> None:
    try:
        store.delete(folder)
    except SparkHvdError as error:  # the failure that led here is the one to report
        logger.warning("Could not remove the unfinished dataset: %s", error)


def prepared(df: DataFrame, selection: Selection, seed: int) -> DataFrame:
    """The rows as they are written: the selected columns, the sizes of arrays, and with validation the split."""
    from pyspark.sql import functions  # noqa: PLC0415  (ranks read this package without Spark)

    columns = selection.schema.columns
    chosen = expressions(columns)
    if selection.validation is None:
        rows = df.select(*chosen)
    elif isinstance(selection.validation, str):
        rows = df.select(*chosen, _split_by_column(df, selection.validation).alias(_SPLIT))
    else:
        rows = df.select(*chosen)
        rows = rows.select("*", _split_by_fraction(columns, selection.validation, seed).alias(_SPLIT))
    sizes = [functions.array_size(source(column.name)).alias(name) for column, name in size_columns(columns)]
    return rows.select(*(source(column.name) for column in columns), *sizes, *map(source, rows.columns[len(columns) :]))


def _write(df: DataFrame, selection: Selection, url: str, seed: int) -> None:
    from pyspark.sql import functions  # noqa: PLC0415

    rows = prepared(df, selection, seed)
    if selection.validation is not None:
        numbered = rows.withColumn(_ROW, functions.monotonically_increasing_id())
        rows = numbered.sortWithinPartitions(_SPLIT, _ROW).drop(_ROW)
    writer = rows.write.mode("errorifexists").options(
        **{
            "compression": "snappy",
            "parquet.block.size": str(ROW_GROUP_BYTES),
            # Numbers to train on seldom repeat enough for a dictionary to pay for its making.
            "parquet.enable.dictionary": "false",
            "parquet.column.statistics.enabled": "true",
        }
    )
    if selection.validation is not None:
        writer = writer.partitionBy(_SPLIT)
    writer.parquet(url)


def _split_by_fraction(columns: Sequence[ColumnSpec], fraction: float, seed: int) -> Column:
    from pyspark.sql import functions  # noqa: PLC0415

    values = [source(column.name) for column in columns]
    place = functions.xxhash64(functions.lit(seed % 2**63).cast("long"), *values)
    held_out = place < functions.lit(int(fraction * 2**64) - 2**63).cast("long")
    return functions.when(held_out, "validation").otherwise("train")


def _split_by_column(df: DataFrame, name: str) -> Column:
    from pyspark.sql import functions  # noqa: PLC0415

    value = source(name)
    unknown = functions.when(value.isNull(), "null")
    if df.schema[name].dataType.simpleString() == "boolean":
        return unknown.when(value, "validation").otherwise("train")
    return unknown.when(value == 1, "validation").when(value == 0, "train").otherwise("other")


def _read_footers(store: Store, dataset_id: str, schema: DataSchema) -> list[FileFacts]:
    folder = layout.dataset_folder(dataset_id)
    paths = [path for path in store.list(layout.dataset_rows_folder(dataset_id)) if path.endswith(".parquet")]
    width = len(schema.columns) + len(size_columns(schema.columns))
    with ThreadPoolExecutor(16, thread_name_prefix="sparkhvd-footers") as pool:
        files = list(pool.map(lambda path: _read_footer(store, folder, path, width), paths))
    return sorted((file for file in files if any(file.row_groups)), key=lambda file: (file.place, file.path))


def _read_footer(store: Store, folder: str, path: str, width: int) -> FileFacts:
    import pyarrow as pa  # noqa: PLC0415  (heavy)
    from pyarrow import parquet  # noqa: PLC0415

    try:
        filesystem, place = store.arrow(path)
        footer = parquet.read_metadata(place, filesystem=filesystem)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"Cannot read the footer of {store.url}/{path}, just written by Spark: {error}.") from error
    name = _PART.fullmatch(path.rpartition("/")[2])
    if name is None or footer.num_columns != width:
        raise DataError(f"{store.url}/{path} is not a file as Spark writes it: {footer.num_columns} columns.")
    groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
    chunks = [[group.column(index).statistics for group in groups if group.num_rows] for index in range(width)]
    if any(part is None or not part.has_null_count for column in chunks for part in column):
        raise DataError(f"{store.url}/{path} has no statistics; allow Spark to write them (parquet.column.statistics).")
    split = re.search(rf"/{_SPLIT}=(\w+)/", path)
    return FileFacts(
        path=path.removeprefix(folder + "/"),
        split=split[1] if split else "train",  # type: ignore[arg-type]  # the values of the split expressions
        place=(int(name[1]), int(name[2])),
        row_groups=tuple(group.num_rows for group in groups),
        columns=tuple(
            ColumnFacts(
                sum(part.null_count for part in column),
                min((part.min for part in column if part.has_min_max), default=None),
                max((part.max for part in column if part.has_min_max), default=None),
            )
            for column in chunks
        ),
    )


def _split(files: Sequence[FileFacts], split: SplitValue) -> Split:
    return Split(tuple(DataFile(file.path, file.row_groups) for file in files if file.split == split))
