"""Dates and timestamps that Spark wrote in the Julian calendar, which only Spark converts.

Spark before 3.0 writes old days in this calendar, and before 3.1 also in timestamps of 96 bits. Later versions do so on
request, and then leave a mark in the file. Timestamps of 96 bits have no smallest value in the footer, so they are
checked when they are read.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkhvd.data.schema import columns
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

_VERSION = b"org.apache.spark.version"
_MARK, _MARK_96_BITS = b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96"
_BEFORE_3_0, _BEFORE_3_1 = re.compile(rb"[12]\."), re.compile(rb"([12]|3\.0)\.")


def julian_leaves(metadata: parquet.FileMetaData) -> frozenset[str]:
    """Return the paths of a file's leaves whose old dates or timestamps, if any, are in the Julian calendar."""
    notes = metadata.metadata or {}
    version = notes.get(_VERSION, b"")
    is_julian = _MARK in notes or _BEFORE_3_0.match(version) is not None
    is_julian_96_bits = _MARK_96_BITS in notes or _BEFORE_3_1.match(version) is not None
    if not is_julian_96_bits and not is_julian:
        return frozenset()
    leaves = [metadata.schema.column(index) for index in range(metadata.num_columns)]
    return frozenset(
        leaf.path for leaf in leaves if (is_julian_96_bits if leaf.physical_type == "INT96" else is_julian)
    )


def check_calendar(column: ColumnSpec, smallest: Any, url: str) -> None:
    """Refuse a column of ``julian_leaves`` with dates or timestamps on which Spark's two calendars differ.

    Args:
        column: the column.
        smallest: its smallest value.
        url: the file.

    Raises:
        DataError: the value is before 1582-10-15, or 1900-01-01 for a timestamp, because time zones differ, too.
    """
    first_common_day = "1582-10-15" if column.dtype == "datetime64[D]" else "1900-01-01"
    if column.dtype.startswith("datetime64") and smallest < np.datetime64(first_common_day):
        raise DataError(
            f"Column {column.name!r} ({column.role}) has values before {first_common_day} in {url}, "
            "which Spark wrote in the Julian calendar (before Spark 3.1, or with "
            "spark.sql.parquet.datetimeRebaseModeInWrite=LEGACY or int96RebaseModeInWrite=LEGACY). Write the files "
            "again with CORRECTED, or fit the DataFrame that Spark reads from them."
        )


def check_rows(batch: pa.RecordBatch, schema: DataSchema, julian: Collection[str], url: str) -> None:
    """Refuse rows with old dates or timestamps in leaves of a file that are in the Julian calendar.

    Raises:
        DataError: see ``check_calendar``.
    """
    import pyarrow.compute as pc  # noqa: PLC0415  (heavy)

    for column in schema.columns:
        path = ".".join(column.path)
        is_time = column.dtype.startswith("datetime64") and column.codec is None
        if is_time and any(f"{leaf}.".startswith(f"{path}.") for leaf in julian):
            values = columns.stored(batch, column)
            for _ in range(column.depth):
                values = values.flatten()
            if len(values) > values.null_count:
                check_calendar(column, np.array(pc.min(values).value, column.dtype), url)
