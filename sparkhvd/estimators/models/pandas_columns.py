"""Convert columns of pandas DataFrames to a model's input arrays, with the types that ``transform`` would use."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sparkhvd._util.counts import counted
from sparkhvd.data.schema import columns as columns_of
from sparkhvd.data.schema.data_schema import ColumnSpec
from sparkhvd.errors import DataError, SchemaError

if TYPE_CHECKING:
    import pandas as pd

# The dtypes that Spark uses for numbers of types that it lacks.
_SPARK_DTYPES = {"uint8": "int16", "uint16": "int32", "uint32": "int64", "float16": "float32"}


def feature_array(series: pd.Series[Any], column: ColumnSpec) -> npt.NDArray[np.generic]:
    """Return a column as the model's input; NULL becomes the column's fill.

    Numbers keep their type in the table, regardless of the type that the model was trained on.

    Raises:
        DataError: the column holds NULL without a fill, or its shape differs from the training.
        SchemaError: the model takes numbers and the column holds something else.
    """
    null = _null_mask(series, column)
    if null.any() and column.fill is None:
        raise DataError(
            f"Feature column {column.name!r} holds NULL in {null.sum()} of {counted(len(series), 'row')}, for which "
            "there is no prediction. Drop these rows first, or fill them (table.fillna)."
        )
    present = series[~null]
    spec = replace(column, shape=column.shape or (), entries=None)
    if column.sparse:
        return _sparse(present, np.flatnonzero(~null), len(series), spec)
    rows = _rows(present, spec) if len(present) else columns_of.empty(spec, 0)
    if not null.any():
        return rows
    fill = np.asarray(column.fill)
    exact = rows.dtype.kind not in "biuf" or fill.astype(rows.dtype) == fill
    array = np.empty((len(series), *rows.shape[1:]), rows.dtype if exact else np.result_type(rows, fill))
    array[null], array[~null] = column.fill, rows
    return array


def _rows(present: pd.Series[Any], column: ColumnSpec) -> npt.NDArray[np.generic]:
    """Return the values that are not NULL, one row each; the column's fill replaces NULL inside of arrays."""
    if column.kind == "array" and column.shape:
        present = present.map(partial(_filled, column=column, depth=len(column.shape)))
    if not column.is_number:
        array = columns_of.empty(column, len(present))
        array[:] = np.stack([np.asarray(value, array.dtype) for value in present]) if column.shape else list(present)
        return array
    try:
        decimals = "int64" if column.dtype.startswith("int") else "float64"  # the training converted decimals like this
        rows = np.stack([_dense(value, decimals) for value in present])
    except ValueError as error:
        raise DataError(f"Feature column {column.name!r} has rows of different shapes. Pad or cut them.") from error
    if present.dtype.kind in "biuf":  # single values may have another type than the column
        dtype: Any = present.dtype
        rows = rows.astype(getattr(dtype, "numpy_dtype", dtype))
    if rows.dtype.kind not in "biuf":
        raise SchemaError(
            f"Feature column {column.name!r} holds {type(present.iloc[0]).__name__} values; the model takes numbers. "
            "Convert the column."
        )
    if rows.shape[1:] != column.shape:
        raise DataError(
            f"Feature column {column.name!r} has rows of shape {list(rows.shape[1:])}; the model was trained with rows "
            f"of shape {list(column.shape or ())}. Reshape the rows."
        )
    return np.ascontiguousarray(rows, _SPARK_DTYPES.get(rows.dtype.name, rows.dtype))


def _filled(value: Any, column: ColumnSpec, depth: int) -> npt.NDArray[Any]:
    """Return an array of ``depth`` levels with the column's fill in place of NULL."""
    parts = np.asarray(value) if depth == 1 or isinstance(value, np.ndarray) else value
    if depth > 1 and not (isinstance(parts, np.ndarray) and parts.ndim == depth and parts.dtype.kind != "O"):
        inner = [None if part is None else _filled(part, column, depth - 1) for part in parts]
        shape = next((part.shape for part in inner if part is not None), (column.shape or ())[-depth + 1 :])
        return np.stack([np.full(shape, _fill(column)) if part is None else part for part in inner])
    if parts.dtype.kind not in "fMO" or not (null := _is_null(parts, column)).any():
        return parts
    fill: Any = _fill(column)
    if parts.dtype.kind != "O":
        return np.where(null, np.asarray(fill, parts.dtype), parts)
    values = parts.ravel().tolist()
    if any(isinstance(part, Decimal) for part in values):
        fill = Decimal(str(fill))
    return np.asarray([fill if absent else part for part, absent in zip(values, null.flat, strict=True)])


def _is_null(array: npt.NDArray[Any], column: ColumnSpec) -> npt.NDArray[np.bool_]:
    """Return which elements of an array are NULL; see ``_null_mask`` about NaN."""
    import pandas as pd  # noqa: PLC0415

    if array.dtype.kind == "O":
        return np.asarray([part is None or part is pd.NA or part is pd.NaT for part in array.flat], bool)
    if array.dtype.kind == "f" and column.fill is None and column.dtype.startswith("float"):
        return np.zeros(array.shape, bool)
    return np.asarray(np.isnat(array) if array.dtype.kind == "M" else np.isnan(array), bool)


def _fill(column: ColumnSpec) -> object:
    if column.fill is None:
        raise DataError(
            f"Feature column {column.name!r} holds NULL inside of arrays, for which there is no prediction. Drop these "
            "rows first, or fill them."
        )
    return column.fill


def _null_mask(series: pd.Series[Any], column: ColumnSpec) -> npt.NDArray[np.bool_]:
    """Return a mask of NULL rows; in a float column without a fill, NaN is a value although pandas uses it for NULL."""
    is_numpy = isinstance(series.dtype, np.dtype)  # pandas' own types distinguish NaN and NULL
    if column.fill is None and column.dtype.startswith("float") and is_numpy and series.dtype.kind == "f":
        return np.zeros(len(series), bool)
    return series.isna().to_numpy(bool)


def _sparse(
    present: pd.Series[Any], row_indices: npt.NDArray[np.integer], count: int, column: ColumnSpec
) -> npt.NDArray[np.generic]:
    """Return a sparse column of ``count`` rows; the rows at ``row_indices`` have the values ``present``."""
    entries = [_entries(value) for value in present]
    lengths = [len(indices) for indices, _ in entries]
    return columns_of.from_entries(
        count,
        np.repeat(row_indices, lengths),
        np.concatenate([np.empty(0, np.int64), *(indices for indices, _ in entries)]),
        np.concatenate([np.empty(0), *(values for _, values in entries)]),
        column,
        "the table",
    )


def _entries(value: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the indices and values of a vector's entries; for a dense vector, only the nonzero entries."""
    if hasattr(value, "indices"):
        return np.asarray(value.indices, np.int64), np.asarray(value.values, np.float64)
    dense = _dense(value)
    return np.flatnonzero(dense), dense[np.flatnonzero(dense)]


def _dense(value: Any, decimals: str = "float64") -> npt.NDArray[Any]:
    """Return a value as one array.

    Args:
        value: a number, vector, array or list. ``toPandas`` nests arrays in arrays of objects.
        decimals: the type for decimals. An integer type is used only if they have no fractions.
    """
    array = np.asarray(value.toArray() if hasattr(value, "toArray") else value)
    if array.dtype.kind != "O" or not array.size:
        return array
    if all(isinstance(part, Decimal) for part in array.flat):
        floats = any(part != part.to_integral_value() for part in array.flat)
        return array.astype("float64" if floats else decimals)
    nested = all(isinstance(part, np.ndarray | list | tuple) for part in array.flat)
    return np.stack([_dense(part, decimals) for part in array.flat]) if nested else array
