"""Arrays in the memory pool of Arrow. The pool reuses freed memory, which is faster than new pages from the system.

A view of such an array (in numpy, or a tensor without a copy) keeps the array alive, so memory returns to the pool only
when nothing refers to it. Decoded columns use the same pool.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sparkhvd.data.schema import columns
from sparkhvd.data.schema.data_schema import ColumnSpec


def empty(column: ColumnSpec, rows: int) -> npt.NDArray[np.generic]:
    """Allocate an array for this number of rows of a column."""
    import pyarrow as pa  # noqa: PLC0415  (heavy)

    kind, shape = columns.array_type(column), (rows, *columns.row_shape(column))
    size = kind.itemsize * math.prod(shape)
    if kind.hasobject or not size:  # the pool cannot hold Python objects
        return columns.empty(column, rows)
    return np.frombuffer(pa.allocate_buffer(size), kind).reshape(shape)
