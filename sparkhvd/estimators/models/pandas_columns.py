"""Columns of pandas tables as a model gets them: with the type of their own values, as ``transform`` gives them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sparkhvd.data.schema import columns as columns_of
from sparkhvd.data.schema.data_schema import ColumnSpec
from sparkhvd.errors import DataError, SchemaError

if TYPE_CHECKING:
    import pandas as pd

# What Spark makes of numbers that it has no type for.
_IN_SPARK = {"uint8": "int16", "uint16": "int32", "uint32": "int64", "float16": "float32"}


def feature_array(series: pd.Series[Any], column: ColumnSpec) -> npt.NDArray[np.generic]:
    """A column as the model gets it; NULL becomes the column's fill.

    Numbers keep the type that they have in the table: what a model was trained on does not change its input.

    Raises:
        DataError: it holds NULL without a fill, or rows of another shape than in the training.
        SchemaError: it holds no numbers, but the model takes numbers.
    """
    null = _null(series, column)
    if null.any() and column.fill is None:
        raise DataError(
            f"Feature column {column.name!r} holds NULL in {null.sum()} of {len(series)} rows, for which there is no "
            "prediction. Drop these rows first, or fill them (table.fillna)."
        )
    present = series[~null]
    known = replace(column, shape=column.shape or (), entries=None)
    if column.sparse:
        return _sparse(present, np.flatnonzero(~null), len(series), known)
    rows = _rows(present, known) if len(present) else columns_of.empty(known, 0)
    if not null.any():
        return rows
    fill = np.asarray(column.fill)
    exact = rows.dtype.kind not in "biuf" or fill.astype(rows.dtype) == fill
    array = np.empty((len(series), *rows.shape[1:]), rows.dtype if exact else np.result_type(rows, fill))
    array[null], array[~null] = column.fill, rows
    return array


def _rows(present: pd.Series[Any], column: ColumnSpec) -> npt.NDArray[np.generic]:
    """The values that are not NULL, one row each."""
    if not column.is_number:
        array = columns_of.empty(column, len(present))
        array[:] = np.stack([np.asarray(value, array.dtype) for value in present]) if column.shape else list(present)
        return array
    try:
        rows = np.stack([_dense(value) for value in present])
    except ValueError as error:
        raise DataError(f"Feature column {column.name!r} has rows of different shapes.") from error
    if present.dtype.kind in "biuf":  # its own type, where single values have none
        own: Any = present.dtype
        rows = rows.astype(getattr(own, "numpy_dtype", own))
    if rows.dtype.kind not in "biuf":
        raise SchemaError(
            f"Feature column {column.name!r} holds {type(present.iloc[0]).__name__} values; the model takes numbers."
        )
    if rows.shape[1:] != column.shape:
        raise DataError(
            f"Feature column {column.name!r} has rows of shape {list(rows.shape[1:])}; the model was trained with rows "
            f"of shape {list(column.shape or ())}."
        )
    return np.ascontiguousarray(rows, _IN_SPARK.get(rows.dtype.name, rows.dtype))


def _null(series: pd.Series[Any], column: ColumnSpec) -> npt.NDArray[np.bool_]:
    """Which rows are NULL; pandas has NaN for it too, which is a number as long as nothing else is to be put there."""
    if column.fill is None and column.dtype.startswith("float") and series.dtype.kind == "f":
        return np.zeros(len(series), bool)
    return series.isna().to_numpy(bool)


def _sparse(
    present: pd.Series[Any], places: npt.NDArray[np.integer], count: int, column: ColumnSpec
) -> npt.NDArray[np.generic]:
    """A sparse column of so many rows, of which those at ``places`` have entries."""
    found = [_stored(value) for value in present]
    lengths = [len(indices) for indices, _ in found]
    return columns_of.from_entries(
        count,
        np.repeat(places, lengths),
        np.concatenate([np.empty(0, np.int64), *(indices for indices, _ in found)]),
        np.concatenate([np.empty(0), *(values for _, values in found)]),
        column,
        "the table",
    )


def _stored(value: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The entries of a vector, with their places; of a dense one, those that are not 0."""
    if hasattr(value, "indices"):
        return np.asarray(value.indices, np.int64), np.asarray(value.values, np.float64)
    dense = _dense(value)
    return np.flatnonzero(dense), dense[np.flatnonzero(dense)]


def _dense(value: Any) -> npt.NDArray[Any]:
    return np.asarray(value.toArray() if hasattr(value, "toArray") else value)
