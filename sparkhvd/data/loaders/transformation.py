"""Determines the columns that a transformation function returns, by calling it on a few rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sparkhvd._util.counts import counted
from sparkhvd.data.read.batches import Arrays
from sparkhvd.data.schema.data_schema import NUMBERS, ColumnSpec, DataSchema
from sparkhvd.errors import DataError


def transformed(
    schema: DataSchema, function: Callable[[Arrays], Arrays], rows: Arrays, *, any_columns: bool = False
) -> tuple[DataSchema, Arrays]:
    """Return the transformed schema and the transformed rows.

    Args:
        schema: the columns as they are read.
        function: maps columns by name to columns by name, with as many rows.
        rows: a few rows.
        any_columns: whether the function may omit columns, and return additional ones, which become features.

    Raises:
        DataError: the function fails, or its result cannot be trained on; the message names the column.
    """
    before = ", ".join(f"{name}: {array.dtype}{list(array.shape)}" for name, array in rows.items())
    try:
        returned = function({name: array.copy() for name, array in rows.items()})
        arrays = {name: np.asarray(values) for name, values in returned.items()}
    except Exception as error:
        raise DataError(
            f"transformation_fn raised {type(error).__name__}: {str(error).rstrip('.')}. It was called with {before}."
        ) from error
    columns = schema.columns
    if any_columns:
        if not arrays:
            raise DataError("transformation_fn returned no columns; return the columns that the training needs.")
        added = [ColumnSpec(name, "", None, "feature", "array") for name in arrays if name not in schema.names()]
        kept = [column for column in columns if column.name in arrays]
        columns = (*(c for c in kept if c.role == "feature"), *added, *(c for c in kept if c.role != "feature"))
    count = len(next(iter(rows.values())))
    return DataSchema(tuple(_column(column, arrays, rows, count) for column in columns)), arrays


def _column(column: ColumnSpec, arrays: Arrays, rows: Arrays, count: int) -> ColumnSpec:
    if column.name not in arrays:
        raise DataError(
            f"transformation_fn returned the columns {list(arrays)} without {column.name!r}, which is a {column.role} "
            "column; return every feature, label and weight under its own name."
        )
    array = arrays[column.name]
    if array.ndim == 0 or len(array) != count:
        raise DataError(
            f"transformation_fn returned shape {list(array.shape)} for {counted(count, 'row')} of column "
            f"{column.name!r}; it must keep the number of rows."
        )
    if column.sparse and array.dtype == rows[column.name].dtype:
        return column
    if str(array.dtype) not in NUMBERS:
        raise DataError(f"transformation_fn returned column {column.name!r} as {array.dtype}; convert it to a number.")
    shape = tuple(array.shape[1:])
    kind = column.kind if shape == column.shape else ("array" if shape else "scalar")
    return replace(
        column, dtype=str(array.dtype), shape=shape, kind=kind, sparse=False, entries=None, fill=None, depth=len(shape)
    )
