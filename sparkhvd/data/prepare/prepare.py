"""Prepares a dataset from a DataFrame in one evaluation of its lineage.

Spark writes the Parquet files of both splits at once, without a shuffle. The footers of these files contain everything
else that is needed: row counts, NULL counts and the lengths of arrays. To record the lengths, every array or vector
column gets additional columns with its sizes. The footers contain their minimum and maximum, and the readers skip them.

Two splits in one write require dynamic partitioning. For that, Spark sorts the rows of each task by split, unless
spark.sql.maxConcurrentOutputFileWriters lets a task keep one file open per split. That setting belongs to a session,
not to a write, so the write runs in a copy of the user's session. A session of Spark Connect cannot be copied. Its rows
are sorted by (split, row number), which satisfies Spark and keeps the DataFrame's order. A sort by split alone would
not keep the order when it spills to disk.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

from sparkhvd._util.counts import counted
from sparkhvd.compat.spark import is_connect
from sparkhvd.data.prepare import validation_split
from sparkhvd.data.prepare.footers import Footer, read_footers
from sparkhvd.data.prepare.stats import (
    SPLIT,
    ColumnFacts,
    FileFacts,
    Measure,
    SplitValue,
    check_rows,
    checked_schema,
    label_ranges,
    size_columns,
)
from sparkhvd.data.reuse.fingerprint import Fingerprint
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.data.schema.manifest import DataFile, Manifest, Split
from sparkhvd.data.schema.selection import RESERVED_PREFIX, Selection, expressions, quoted, source
from sparkhvd.data.spark.job import counting, run_job
from sparkhvd.data.spark.settings import spark_can_write, with_own_settings
from sparkhvd.errors import ConfigError, DataError, SparkHvdError, StoreError
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

logger = logging.getLogger(__name__)

# Small enough that a rank reads little more than its shard and that windows mix several row groups, large enough for
# sequential reading.
ROW_GROUP_BYTES = 8 * 1024 * 1024
SMALLEST_ROW_GROUP_BYTES = 1024 * 1024

_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_ROW = RESERVED_PREFIX + "row"
_SPLIT_FILES = 4  # files that a task keeps open: train, validation and two kinds of rejected rows
# Spark names files by task and by their number within the task; tasks are in DataFrame order.
_PART = re.compile(r"part-(\d+)-.*[.-]c(\d+)\.(?:\w+\.)?parquet")
_MICROSECONDS = "TIMESTAMP_MICROS"
_VECTOR_LEAVES = 4  # Parquet columns of a vector: type, size, indices, values


@dataclass(frozen=True)
class WriteOptions:
    """Options for writing the rows.

    Attributes:
        num_proc: the number of ranks that will train.
        seed: determines which rows a validation fraction holds out.
        partitions_per_process: the minimum number of row groups per rank, if there are enough rows.
        row_group_bytes: bytes of a row group in memory; None chooses by ``partitions_per_process``.
        compress: whether dense vectors are written in the sparse form.
    """

    num_proc: int
    seed: int
    partitions_per_process: int = 10
    row_group_bytes: int | None = None
    compress: bool = False

    def __post_init__(self) -> None:
        for name in ("num_proc", "partitions_per_process", "row_group_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")


def refuse_streaming(df: DataFrame) -> None:
    """Raise ``DataError`` for a streaming DataFrame."""
    if df.isStreaming:
        raise DataError("A streaming DataFrame has no end and cannot be prepared. Prepare its batches in foreachBatch.")


def prepare(
    df: DataFrame,
    selection: Selection,
    store: Store,
    *,
    writing: WriteOptions,
    dataset_id: str | None = None,
    name: str | None = None,
    fingerprint: Fingerprint | None = None,
    identify: Callable[[], Fingerprint | None] = lambda: None,
) -> Manifest:
    """Write the selected columns of ``df`` to ``store`` as a new dataset.

    The lineage of ``df`` is evaluated once. The dataset has its own id and never changes. It becomes visible in the
    last step, when its manifest is published. A failure removes the files that were written; an interrupt first cancels
    the Spark job.

    Args:
        df: the rows; their order is kept.
        selection: the result of ``select(df.schema, ...)``.
        store: the Store that receives the dataset.
        writing: the options for writing. Which rows a validation fraction holds out depends on a hash of the seed and
            the feature and label values (see ``sparkhvd.data.prepare.validation_split``), so equal rows are in the same
            split.
        dataset_id: from ``layout.new_dataset_id``; None creates one.
        name: the user's name for the dataset.
        fingerprint: the fingerprint of ``df``, computed just before the call.
        identify: computes the fingerprint again after the write; the manifest records it only if both are equal.

    Returns:
        The manifest as published, with all shapes known.

    Raises:
        DataError: a column or an array without a fill contains NULL; there are no rows, no training rows, fewer
            training rows than ranks, or no validation rows although a validation split was requested; or the validation
            column has values other than 0 and 1.
        SchemaError: an array or vector column has rows of different lengths, or of length 0.
        Exception: Spark's error if its job failed.
        StoreError: the Store could not be read, the manifest could not be written, or rows that Spark wrote are missing
            from the Store.
    """
    refuse_streaming(df)
    dataset_id = dataset_id or layout.new_dataset_id()
    try:
        written = _write(df, selection, store, layout.dataset_rows_folder(dataset_id), writing)
        files = _read_facts(store, dataset_id, written.paths, selection.schema)
        _check_all_rows_arrived(written.rows, files, store)
        check_rows(files, selection, writing.num_proc)
        manifest = Manifest(
            dataset_id=dataset_id,
            folder=layout.dataset_folder(dataset_id),
            schema=written_schema(checked_schema(selection.schema, files)),
            train=_split(files, "train"),
            validation=None if selection.validation is None else _split(files, "validation"),
            seed=writing.seed,
            validated_by=selection.validation,
            labels=label_ranges(selection.schema, files),
            fingerprint=fingerprint.text if fingerprint is not None and fingerprint == identify() else None,
            name=name,
        )
        store.publish(layout.manifest_path(dataset_id), manifest.to_json())
    except BaseException:
        _remove(store, layout.dataset_folder(dataset_id))
        raise
    held_out = 0 if manifest.validation is None else manifest.validation.rows
    rows = counted(manifest.train.rows, "row")
    logger.info("Prepared dataset %s: %s to train on, %d held out", dataset_id, rows, held_out)
    return manifest


def _check_all_rows_arrived(written: int, files: Sequence[FileFacts], store: Store) -> None:
    """Detect a folder that the machines do not share: Spark's commit moves only the files that the driver sees."""
    count = sum(sum(file.row_groups) for file in files)
    if count != written:
        raise StoreError(
            f"The DataFrame has {counted(written, 'row')}, but {count} of them arrived in {store.url}. Check that the "
            "driver and all executors share this folder."
        )


def _remove(store: Store, folder: str) -> None:
    try:
        store.delete(folder)
    except SparkHvdError as error:  # the original failure is the one to report
        logger.warning("Could not remove the unfinished dataset: %s", error)


def rows_to_write(df: DataFrame, selection: Selection, seed: int, *, compress: bool = False) -> DataFrame:
    """Return the rows to write: the selected columns, the sizes of arrays and, with validation, the split."""
    from pyspark.sql import functions  # noqa: PLC0415  (ranks read this package without Spark)

    columns = selection.schema.columns
    chosen = expressions(columns, compress=compress)
    if selection.validation is None:
        rows = df.select(*chosen)
    elif isinstance(selection.validation, str):
        rows = df.select(*chosen, validation_split.by_column(df, selection.validation).alias(SPLIT))
    else:
        split = validation_split.by_fraction(columns, selection.validation, seed)
        read = dict.fromkeys(column.path[0] for column in columns)
        rows = df.select(*map(quoted, read), split.alias(SPLIT)).select(*chosen, SPLIT)
    sizes = [_measured(measure, functions).alias(measure.name) for measure in size_columns(columns)]
    rest = rows.columns[len(columns) :]
    return rows.select(*(quoted(column.name) for column in columns), *sizes, *map(quoted, rest))


def _measured(measure: Measure, functions: Any) -> Column:
    value = source(measure.column.name)
    if measure.column.kind == "vector":
        is_dense, indices, values = value["type"] == 1, value["indices"], value["values"]
        if measure.what == "length":
            size = functions.when(is_dense, functions.array_size(values)).otherwise(value["size"])
        else:
            filled = functions.array_size(functions.filter(values, lambda element: element != 0))
            size = functions.when(is_dense, filled).otherwise(functions.array_size(indices))
        return cast("Column", size)
    if measure.what == "length":
        return cast("Column", functions.array_size(value))
    for _ in range(measure.level - 1):
        value = functions.flatten(functions.filter(value, lambda inner: inner.isNotNull()))  # else NULL if one is NULL
    sizes = functions.transform(value, functions.array_size)
    return cast("Column", (functions.array_min if measure.what == "shortest" else functions.array_max)(sizes))


def row_group_bytes(rows: DataFrame, writing: WriteOptions) -> int:
    """Return the size of a row group in bytes: each rank gets ``partitions_per_process`` of them if possible."""
    if writing.row_group_bytes is not None:
        return writing.row_group_bytes
    parts = writing.num_proc * writing.partitions_per_process
    return max(SMALLEST_ROW_GROUP_BYTES, min(ROW_GROUP_BYTES, _estimated_bytes(rows) // parts))


def _estimated_bytes(rows: DataFrame) -> int:
    """Return the planner's estimate of the size, which is far too large if the planner has no statistics."""
    if is_connect(rows.sparkSession):
        return 2**62
    plan = rows._jdf.queryExecution().optimizedPlan()  # noqa: SLF001  (no public access to its statistics)
    return int(str(plan.stats().sizeInBytes()))


@dataclass(frozen=True)
class _Written:
    """The number of rows of a write, and those files of its successful tasks that the Store contains."""

    rows: int
    paths: Sequence[str]


def _write(df: DataFrame, selection: Selection, store: Store, folder: str, writing: WriteOptions) -> _Written:
    """Write the rows."""
    rows = rows_to_write(df, selection, writing.seed, compress=writing.compress)
    group_bytes = row_group_bytes(rows, writing)
    url = store.spark_url(folder)
    if url is not None and spark_can_write(df.sparkSession, url) and not _changes_times(df, selection.schema):
        options = {"parquet.block.size": str(group_bytes), **store.spark_options()}
        with _reporting_full_disk(store):
            count = _write_by_spark(rows, url, options, divided=selection.validation is not None)
        return _Written(count, [path for path in store.list(folder) if _is_committed(path.removeprefix(f"{folder}/"))])
    from sparkhvd.data.prepare import arrow_writer  # noqa: PLC0415  (heavy)

    by = None if selection.validation is None else SPLIT
    write = partial(arrow_writer.write, rows, store, folder, row_group_bytes=group_bytes, split=by)
    with _reporting_full_disk(store):
        rows_of = run_job(df.sparkSession, write)
    # A failed or speculative task may still add a file, which does not count; a file may be missing from a Store that
    # the machines do not share.
    return _Written(sum(rows_of.values()), [path for path in store.list(folder) if path in rows_of])


@contextmanager
def _reporting_full_disk(store: Store) -> Iterator[None]:
    """Name the Store and the reason if a write by Spark finds no space; Spark's error has the reason in its middle."""
    try:
        yield
    except Exception as error:
        if (reason := _FULL.search(str(error))) is None:
            raise
        raise StoreError(
            f"Spark cannot write the rows to {store.url}: {reason[0]}. Free space there, and in Spark's local folders "
            "(spark.local.dir)."
        ) from error


def _is_committed(name: str) -> bool:
    """Return whether Spark has committed a file in the folder of its output.

    A failed or speculative task may leave files in ``_temporary`` after Spark has removed that folder.
    """
    return name.endswith(".parquet") and not name.startswith(("_", "."))


def _changes_times(df: DataFrame, schema: DataSchema) -> bool:
    """Return whether Spark's writer truncates timestamps, omits their statistics, or rebases or refuses old times."""
    conf = df.sparkSession.conf
    dtypes = {column.dtype for column in schema.columns}
    # By default, Spark writes INT96, which has no statistics and a setting of its own for the calendar.
    if "datetime64[us]" in dtypes and conf.get("spark.sql.parquet.outputTimestampType") != _MICROSECONDS:
        return True
    # LEGACY moves dates before 1582 and timestamps before 1900 to the Julian calendar, and only Spark moves them back.
    # EXCEPTION, the default until Spark 3.5, refuses them.
    calendar = str(conf.get("spark.sql.parquet.datetimeRebaseModeInWrite"))
    return calendar.upper() != "CORRECTED" and not dtypes.isdisjoint({"datetime64[D]", "datetime64[us]"})


def _write_by_spark(rows: DataFrame, url: str, more_options: dict[str, str], *, divided: bool) -> int:
    from pyspark.sql import functions  # noqa: PLC0415

    options = {
        "compression": "snappy",
        # Training data seldom repeat enough for a dictionary to pay off.
        "parquet.enable.dictionary": "false",
        "parquet.column.statistics.enabled": "true",
        **more_options,
    }
    if divided:
        unsorted = with_own_settings(rows, {"spark.sql.maxConcurrentOutputFileWriters": str(_SPLIT_FILES)})
        if unsorted is not None:
            rows = unsorted
        else:
            numbered = rows.withColumn(_ROW, functions.monotonically_increasing_id())
            rows = numbered.sortWithinPartitions(SPLIT, _ROW).drop(_ROW)
    rows, counted = counting(rows)
    writer = rows.write.mode("error").options(**options)
    if divided:
        writer = writer.partitionBy(SPLIT)
    run_job(rows.sparkSession, lambda: writer.parquet(url))
    return counted()


def written_schema(schema: DataSchema) -> DataSchema:
    """Return the schema of the files, in which the fields of structs are columns."""
    return schema.replaced([replace(column, source=()) for column in schema.columns])


def _read_facts(store: Store, dataset_id: str, paths: Sequence[str], schema: DataSchema) -> list[FileFacts]:
    folder = layout.dataset_folder(dataset_id)
    footers = [footer for footer in read_footers(store, paths) if any(footer.row_groups)]
    files = [_facts(store, folder, footer, schema) for footer in footers]
    return sorted(files, key=lambda file: (file.position, file.path))


def _facts(store: Store, folder: str, footer: Footer, schema: DataSchema) -> FileFacts:
    name = _PART.fullmatch(footer.path.rpartition("/")[2])
    leaves = [_VECTOR_LEAVES if column.kind == "vector" else 1 for column in schema.columns]
    leaves += [1] * len(size_columns(schema.columns))
    if name is None or len(footer.columns) != sum(leaves):
        raise DataError(
            f"{store.url}/{footer.path} was not written for this dataset: its name or its number of columns "
            f"({len(footer.columns)}) is wrong. Prepare the data again."
        )
    if any(column.nulls is None for column in footer.columns):
        raise DataError(
            f"{store.url}/{footer.path} lacks column statistics. Enable them (parquet.column.statistics.enabled)."
        )
    starts = [0, *accumulate(leaves)]
    split = re.search(rf"/{SPLIT}=(\w+)/", footer.path)
    return FileFacts(
        path=footer.path.removeprefix(folder + "/"),
        split=split[1] if split else "train",  # type: ignore[arg-type]  # the values of the split expressions
        position=(int(name[1]), int(name[2])),
        row_groups=footer.row_groups,
        columns=tuple(
            ColumnFacts(footer.columns[start].nulls or 0, footer.columns[start].low, footer.columns[start].high)
            for start in starts[:-1]
        ),
    )


def _split(files: Sequence[FileFacts], split: SplitValue) -> Split:
    return Split(tuple(DataFile(file.path, file.row_groups) for file in files if file.split == split))
