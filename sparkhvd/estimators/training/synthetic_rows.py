"""Models tried with made-up rows, while there are no real ones."""

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
_NUMBERED = re.compile(r"_\d+\b")  # of automatic names, which count on
_CHECKS = (AssertionError, ValueError, RuntimeError)
Shapes = list[tuple[int, ...]]


def try_synthetic_rows(schema: DataSchema, try_out: Callable[[Arrays], Shapes]) -> Shapes:
    """Return what ``try_out`` makes of rows of zeros; nothing where only real rows can tell.

    A model may refuse zeros because of their values: its ids count from 1, or it checks its input. Such an error is a
    check in the user's code, or another one for ones than for zeros; an error about shapes is the same for both.

    Args:
        schema: the columns, with all shapes.
        try_out: see ``FrameworkPlugin.try_out``.

    Raises:
        ModelOutputError: the model refuses rows of these shapes, whatever their values.
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
    """Return rows of ones for rows of zeros; what is no number stays."""
    return {name: np.ones_like(array) if array.dtype.kind in "biuf" else array for name, array in rows.items()}


def _depends_on_values(error: ModelOutputError, try_again: Callable[[], object]) -> bool:
    cause = error.__cause__
    if cause is None:  # the shapes of outputs, which were looked at here
        return False
    if isinstance(cause, IndexError) or (isinstance(cause, _CHECKS) and not is_tensor_error(cause)):
        return True
    try:
        try_again()
    except ModelOutputError as other:
        return _text(other.__cause__) != _text(cause)
    return True


def _text(error: object) -> str:
    return _NUMBERED.sub("", str(error))
