"""Reads the footers of Parquet files: row groups, NULLs, smallest and largest values, but no rows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkhvd._util.background import in_threads
from sparkhvd.data.read.blocks import footer_digest
from sparkhvd.data.schema.calendars import julian_leaves
from sparkhvd.data.schema.columns import open_parquet
from sparkhvd.errors import DataError, StoreError
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

_THREADS = 16
# Parquet's units of dates and timestamps -> numpy's.
_UNITS: Mapping[str, str] = MappingProxyType(
    {"days": "D", "milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}
)
_NUMBERS = frozenset({"NONE", "INT", "DECIMAL"})


@dataclass(frozen=True)
class LeafFacts:
    """One Parquet column (a leaf of the schema) of one file.

    Attributes:
        path: the names from the top, joined by dots.
        values: the number of values in each row group, NULLs included; for a scalar column, the number of rows.
        nulls: the NULLs in the whole file, including empty and NULL arrays; None if the file has no such statistics.
        low: the smallest number, date or timestamp (of numpy); None for other types, or without such statistics.
        high: the largest one.
    """

    path: str
    values: tuple[int, ...]
    nulls: int | None
    low: Any = None
    high: Any = None


@dataclass(frozen=True)
class Footer:
    """The contents of one file's footer.

    Attributes:
        path: the file.
        row_groups: the number of rows in each row group.
        size: the bytes of the file.
        columns: the leaves of the schema.
        schema: the columns and their types.
        julian: the paths of the leaves whose old dates or timestamps are in the Julian calendar.
        digest: the digest of the footer, if it was requested; empty otherwise, and for an empty file.
    """

    path: str
    row_groups: tuple[int, ...]
    size: int
    columns: tuple[LeafFacts, ...]
    schema: pa.Schema
    julian: frozenset[str] = frozenset()
    digest: bytes = b""


def read_footers(store: Store, paths: Sequence[str], *, digests: bool = False) -> list[Footer]:
    """Read the footers of these files of a Store, in their order, and ``digests`` of them.

    Raises:
        DataError: a file is not Parquet, or was cut off; the message names its URL.
        StoreError: a file cannot be opened or read, for example because there are too many open files.
    """
    return in_threads(lambda path: _read(store, path, digests), paths, _THREADS, "sparkhvd-footers")


def _read(store: Store, path: str, has_digest: bool) -> Footer:
    import pyarrow as pa  # noqa: PLC0415  (heavy)

    try:
        filesystem, arrow_path = store.arrow(path)
        with filesystem.open_input_file(arrow_path) as file:
            size = file.size()
            if not size:  # a killed writer leaves an empty file, which Spark ignores, too
                return Footer(path, (), 0, (), pa.schema([]))
            opened = open_parquet(file)
            digest = footer_digest(file, size) if has_digest else b""
            return _footer(path, size, opened.metadata, opened.schema_arrow, digest)
    except (OSError, pa.ArrowException) as error:
        if (code := getattr(error, "errno", None)) is not None:  # of the system, not of the content
            raise StoreError(f"Cannot read {store.url}/{path}: {os.strerror(code)}.") from error
        raise DataError(
            f"{store.url}/{path} cannot be read as a Parquet file ({error}). It is damaged, was cut off, or is "
            "something else; write it again, or leave it out of the folder."
        ) from error


def _footer(path: str, size: int, metadata: parquet.FileMetaData, schema: pa.Schema, digest: bytes) -> Footer:
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    return Footer(
        path=path,
        row_groups=tuple(group.num_rows for group in groups),
        size=size,
        columns=tuple(_leaf(index, groups) for index in range(metadata.num_columns)) if groups else (),
        schema=schema,
        julian=julian_leaves(metadata),
        digest=digest,
    )


def _leaf(index: int, groups: Sequence[parquet.RowGroupMetaData]) -> LeafFacts:
    chunks = [group.column(index) for group in groups]
    statistics = [chunk.statistics for chunk, group in zip(chunks, groups, strict=True) if group.num_rows]
    known = all(part is not None and part.has_null_count for part in statistics)
    ends = [_ends(part) for part in statistics if part is not None and part.has_min_max]
    return LeafFacts(
        path=chunks[0].path_in_schema,
        values=tuple(chunk.num_values for chunk in chunks),
        nulls=sum(part.null_count for part in statistics) if known else None,
        low=min((low for low, _ in ends if low is not None), default=None),
        high=max((high for _, high in ends if high is not None), default=None),
    )


def _ends(statistics: parquet.Statistics) -> tuple[Any, Any]:
    """Return the smallest and the largest value; None for values that are neither numbers nor times.

    Python's times end with the year 9999, and strings may not be valid UTF-8, so pyarrow cannot convert all of them.
    """
    kind = statistics.logical_type
    if kind.type in {"DATE", "TIMESTAMP"}:
        unit = _UNITS[json.loads(kind.to_json()).get("timeUnit", "days")]
        low, high = np.array([statistics.min_raw, statistics.max_raw], np.int64).astype(f"datetime64[{unit}]")
        return low, high
    return (statistics.min, statistics.max) if kind.type in _NUMBERS else (None, None)
