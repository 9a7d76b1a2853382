"""Shapes in the form that users write them."""

from __future__ import annotations

from collections.abc import Sequence

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
            f"input_shapes has {counted(shapes, 'shape')}, but feature_cols has {counted(columns, 'column')}: "
            f"{list(columns)}. Pass one shape per column, or leave input_shapes out to concatenate all columns for a "
            "model with one input."
        )


def counted(things: Sequence[object], singular: str, plural: str = "") -> str:
    """Return the number of things with the noun in the right number, such as ``2 columns``."""
    return f"{len(things)} {singular if len(things) == 1 else plural or singular + 's'}"
