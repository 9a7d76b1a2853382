"""Arrays in memory of Arrow's pool: it keeps what is let go for what is made next, while fresh pages cost more time.

Whatever shows a part of such an array (a view of numpy, a tensor that was made without a copy) keeps the array alive,
so memory comes back to the pool only when nobody sees it any more. Decoded columns lie in the same pool.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sparkhvd.data.schema import columns
from sparkhvd.data.schema.data_schema import ColumnSpec


def empty(column: ColumnSpec, rows: int) -> npt.NDArray[np.generic]:
    """Room for so many rows of a column."""
    import pyarrow as pa  # noqa: PLC0415  (heavy)

    kind, shape = columns.array_type(column), (rows, *columns.row_shape(column))
    size = kind.itemsize * math.prod(shape)
    if kind.hasobject or not size:  # the pool knows nothing of Python's objects
        return columns.empty(column, rows)
    return np.frombuffer(pa.allocate_buffer(size), kind).reshape(shape)
