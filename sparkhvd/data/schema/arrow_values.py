"""Views Arrow arrays as numpy arrays without an import of pandas, which takes longer than reading a small dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa


def to_values(array: pa.Array) -> npt.NDArray[np.generic]:
    """Return the values, as does ``array.to_numpy(zero_copy_only=False)``, which always imports pandas.

    Numbers, timestamps and booleans without NULL are read from Arrow's memory; pyarrow converts all others.
    """
    dtype = _dtype(array.type)
    if dtype is None or array.null_count:
        converted: npt.NDArray[np.generic] = array.to_numpy(zero_copy_only=False)
        return converted
    memory = array.buffers()[1]
    if not len(array):
        return np.empty(0, dtype)
    if dtype == np.bool_:
        first_byte, first_bit = divmod(array.offset, 8)  # a slice costs no time for the rows before it
        bits = np.frombuffer(memory, np.uint8, offset=first_byte)
        return np.unpackbits(bits, count=first_bit + len(array), bitorder="little")[first_bit:].view(np.bool_)
    values = np.frombuffer(memory, dtype, len(array), array.offset * dtype.itemsize)
    values.flags.writeable = False  # other arrays may share the memory
    return values


def _dtype(arrow: pa.DataType) -> np.dtype[np.generic] | None:
    """Return the type with the same memory layout, or None if there is none."""
    import pyarrow as pa  # noqa: PLC0415  (heavy)

    types = pa.types
    if types.is_timestamp(arrow):
        return np.dtype(f"datetime64[{arrow.unit}]")
    if types.is_integer(arrow) or types.is_floating(arrow) or types.is_boolean(arrow):
        dtype: np.dtype[np.generic] = np.dtype(arrow.to_pandas_dtype())
        return dtype
    return None
