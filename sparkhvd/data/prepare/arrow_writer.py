"""Writes a DataFrame's rows as Parquet through a Store, where Spark lacks a connector or would change dates and times.

Every task writes the rows of its partition, in their order, to one file per split. Only the files that successful
attempts report count; those of failed or speculative attempts are removed at the end.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from pyarrow import compute, parquet

from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class ArrowWrite:
    """The options that a task needs to write its rows.

    Attributes:
        store: the Store that receives the files.
        folder: the folder of the files in it.
        write_id: a unique id of the write.
        names: the names of the columns, in order. Spark sees other names, because ``mapInArrow`` would read a dot in a
            name as the separator before a field.
        row_group_bytes: bytes of a row group in memory.
        split: the column whose value selects the folder ``<column>=<value>``; it is not written. None means one folder.
    """

    store: Store
    folder: str
    write_id: str
    names: tuple[str, ...]
    row_group_bytes: int
    split: str | None = None


def write(
    rows: DataFrame, store: Store, folder: str, *, row_group_bytes: int, split: str | None = None
) -> dict[str, int]:
    """Write ``rows`` as Parquet files below ``folder``, with the names and folders that Spark uses.

    Args:
        rows: evaluated once; the order within partitions is kept.
        store: the Store that receives the files.
        folder: a folder of the Store without other writers.
        row_group_bytes: bytes of a row group in memory.
        split: a string column; rows go to the folder ``<split>=<value>``, without that column. None means one folder.

    Returns:
        The number of rows of every file, by its path.

    Raises:
        Exception: Spark's error if a task failed; its message contains the task's ``StoreError``.
        StoreError: files of other attempts could not be listed or removed.
    """
    job = ArrowWrite(store, folder, uuid.uuid4().hex, tuple(rows.columns), row_group_bytes, split)
    numbered = rows.toDF(*(f"c{index}" for index in range(len(job.names))))
    written = numbered.mapInArrow(partial(write_partition, job), "path string, rows long").collect()
    rows_of = {row["path"]: row["rows"] for row in sorted(written)}
    for other in set(store.list(folder)) - set(rows_of):
        store.delete(other)
    return rows_of


def write_partition(job: ArrowWrite, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the batches of one partition, and yield the paths of its files and the rows in them."""
    from pyspark import TaskContext  # noqa: PLC0415  (this runs in Spark's tasks)

    context = TaskContext.get()
    if context is None:
        raise RuntimeError("write_partition runs inside a Spark task.")
    name = f"part-{context.partitionId():05d}-{job.write_id}-{context.taskAttemptId()}-c000.snappy.parquet"
    files: dict[str, _File] = {}
    with ExitStack() as opened:
        for batch in batches:
            named = pa.RecordBatch.from_arrays(batch.columns, names=job.names)
            for value, part in _parts_by_split(named, job.split):
                if value not in files:
                    inside = f"{job.split}={value}/{name}" if job.split else name
                    files[value] = _File(job, f"{job.folder}/{inside}", part.schema, opened)
                files[value].add(part)
        for file in files.values():
            file.flush()
    paths = pa.array([file.path for file in files.values()], pa.string())
    yield pa.RecordBatch.from_pydict(
        {"path": paths, "rows": pa.array([file.rows for file in files.values()], pa.int64())}
    )


def _parts_by_split(batch: pa.RecordBatch, split: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    if split is None:
        if batch.num_rows:
            yield "", batch
        return
    column = batch.schema.get_field_index(split)
    rows = batch.select([name for name in batch.schema.names if name != split])
    for value in compute.unique(batch.column(column)).to_pylist():
        yield value, rows.filter(compute.equal(batch.column(column), value))


class _File:
    """One Parquet file, which buffers rows until they fill a row group."""

    def __init__(self, job: ArrowWrite, path: str, schema: pa.Schema, opened: ExitStack) -> None:
        self.path = path
        self.rows = 0
        self._row_group_bytes = job.row_group_bytes
        file = opened.enter_context(job.store.open(path, "wb"))
        # Training data seldom repeat enough for a dictionary to pay off.
        self._writer = opened.enter_context(
            parquet.ParquetWriter(file, schema, compression="snappy", use_dictionary=False, write_statistics=True)
        )
        self._waiting: list[pa.RecordBatch] = []
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self.rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._bytes >= self._row_group_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows, in row groups of equal size."""
        if self._waiting:
            table = pa.Table.from_batches(self._waiting)
            groups = max(1, round(self._bytes / self._row_group_bytes))
            self._writer.write_table(table, row_group_size=math.ceil(table.num_rows / groups))
            self._waiting, self._bytes = [], 0
