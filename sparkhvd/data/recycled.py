"""Memory of rows that nobody holds any more, for the next rows."""

from __future__ import annotations

import sys
from collections import Counter, deque

import numpy as np
import numpy.typing as npt

from sparkhvd.data import columns
from sparkhvd.data.schema import ColumnSpec, DataSchema

# One window is used, one waits, one is in the making.
_WINDOWS = 3
# What refers to an array that only ``Recycled`` knows: a variable, and the call that counts.
_UNHELD = 2

_Kind = tuple[np.dtype[np.generic], tuple[int, ...]]


class Recycled:
    """Room for windows of rows, used again once no array or tensor refers to it: fresh pages cost more than the mixing.

    A view of numpy refers to the array whose memory it shows, and what frameworks make without a copy refers to that
    view; so Python's count of references tells what is still in use anywhere.

    Args:
        schema: the columns of a window.
    """

    def __init__(self, schema: DataSchema) -> None:
        of_a_kind = Counter(_kind(column) for column in schema.columns)
        # One more, in which parts are put together.
        self._limits = {kind: _WINDOWS * count + 1 for kind, count in of_a_kind.items()}
        self._known: dict[_Kind, deque[npt.NDArray[np.generic]]] = {kind: deque() for kind in of_a_kind}

    def empty(self, column: ColumnSpec, rows: int) -> npt.NDArray[np.generic]:
        """Room for so many rows of a column."""
        kind = _kind(column)
        known = self._known[kind]
        for _ in range(len(known)):
            array = known.popleft()
            unheld = sys.getrefcount(array) == _UNHELD
            known.append(array)
            if unheld and len(array) >= rows:
                return array[:rows]
        array = columns.empty(column, rows)
        if not array.dtype.hasobject:  # which would be kept alive
            known.append(array)
        if len(known) > self._limits[kind]:
            known.popleft()
        return array[:rows]


def _kind(column: ColumnSpec) -> _Kind:
    return columns.array_type(column), columns.row_shape(column)
