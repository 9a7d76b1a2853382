"""Shapes in the form that users write them."""

from __future__ import annotations

from collections.abc import Sequence

from sparkhvd._util.counts import counted
from sparkhvd.errors import ParamError


def row_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one row, without a leading -1 for the rows."""
    return tuple(shape[1:]) if shape and shape[0] == -1 else tuple(shape)


def check_input_shapes(shapes: Sequence[Sequence[int]], columns: Sequence[str]) -> None:
    """Refuse ``input_shapes`` without exactly one shape per feature column.

    Raises:
        ParamError: the numbers differ.
    """
    if len(shapes) != len(columns):
        raise ParamError(
            f"input_shapes has {counted(len(shapes), 'shape')}, but feature_cols has "
            f"{counted(len(columns), 'column')}: {list(columns)}. Pass one shape per column, or leave input_shapes out "
            "to concatenate all columns for a model with one input."
        )
