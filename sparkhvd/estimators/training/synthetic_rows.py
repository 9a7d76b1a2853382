"""Try a model with synthetic rows when there are no real rows yet."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from sparkhvd.data.read.batches import Arrays
from sparkhvd.data.schema import columns
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.errors import ModelOutputError
from sparkhvd.estimators.training.user_errors import is_tensor_error

_ROWS = 2
_AUTOMATIC_NUMBER = re.compile(r"_\d+\b")  # the number in an automatic name, which differs from call to call
_CHECK_ERRORS = (AssertionError, ValueError, RuntimeError)
Shapes = list[tuple[int, ...]]


def try_synthetic_rows(schema: DataSchema, try_out: Callable[[Arrays], Shapes]) -> Shapes:
    """Return the output shapes of ``try_out`` for rows of zeros, or an empty list if only real rows can show them.

    A model may reject rows of zeros because of their values, for example if its ids start at 1. Such an error comes
    from a check in the user's code, or differs between zeros and ones. An error about shapes is the same for both.

    Args:
        schema: the columns, with all shapes.
        try_out: see ``FrameworkPlugin.try_out``.

    Raises:
        ModelOutputError: the model rejects rows of these shapes regardless of their values.
    """
    zeros = {column.name: columns.blank(column, _ROWS) for column in schema.columns}
    try:
        return try_out(zeros)
    except ModelOutputError as error:
        ones = rows_of_ones(zeros)
        if _depends_on_values(error, lambda: try_out(ones)):
            return []
        raise


def rows_of_ones(rows: Arrays) -> Arrays:
    """Return the rows with ones in all numeric columns; other columns are unchanged."""
    return {name: np.ones_like(array) if array.dtype.kind in "biuf" else array for name, array in rows.items()}


def at_least_two_rows(rows: Arrays) -> Arrays:
    """Return at least two rows, because one row does not reveal which dimension is the rows."""
    return {name: np.concatenate([array, array])[: max(2, len(array))] for name, array in rows.items()}


def _depends_on_values(error: ModelOutputError, try_again: Callable[[], object]) -> bool:
    cause = error.__cause__
    if cause is None:  # an error about output shapes, which sparkhvd raised itself
        return False
    if isinstance(cause, IndexError) or (isinstance(cause, _CHECK_ERRORS) and not is_tensor_error(cause)):
        return True
    try:
        try_again()
    except ModelOutputError as other:
        return _text(other.__cause__) != _text(cause)
    return True


def _text(error: object) -> str:
    return _AUTOMATIC_NUMBER.sub("", str(error))
