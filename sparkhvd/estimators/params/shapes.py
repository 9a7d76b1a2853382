"""Shapes as users write them."""

from __future__ import annotations

from collections.abc import Sequence

from sparkhvd.errors import ParamError


def row_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape of one row from one that may begin with -1 for the rows."""
    return tuple(shape[1:]) if shape and shape[0] == -1 else tuple(shape)


def check_input_shapes(shapes: Sequence[Sequence[int]], columns: Sequence[str]) -> None:
    """Refuse ``input_shapes`` that are not one per feature column.

    Raises:
        ParamError: there are more or fewer.
    """
    if len(shapes) != len(columns):
        raise ParamError(
            f"input_shapes has {_counted(shapes, 'shape')} but feature_cols has {_counted(columns, 'column')}: "
            f"{list(columns)}. Give one shape per column, or leave input_shapes out: then all columns go side by side "
            "into a model with one input."
        )


def _counted(things: Sequence[object], kind: str) -> str:
    return f"{len(things)} {kind}{'' if len(things) == 1 else 's'}"
