"""Shapes as users write them."""

from __future__ import annotations

from collections.abc import Sequence


def row_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape of one row from one that may begin with -1 for the rows."""
    return tuple(shape[1:]) if shape and shape[0] == -1 else tuple(shape)
