"""Conversion of variables to arrays, and of arrays to bytes: checkpoints store the state of Keras in this form."""

from __future__ import annotations

import io
from collections.abc import Mapping

import keras
import numpy as np
import numpy.typing as npt


def value_of(variable: keras.Variable) -> npt.NDArray[np.generic]:
    """Return a copy of the value of a variable."""
    return np.array(keras.ops.convert_to_numpy(variable))


def arrays_to_bytes(arrays: Mapping[str, npt.NDArray[np.generic]]) -> bytes:
    """Serialize arrays by name into one file, which loads without running code.

    Types that NumPy lacks, such as bfloat16, become float32, which holds all their values.
    """
    buffer = io.BytesIO()
    storable = {name: array.astype(np.float32) if array.dtype.kind == "V" else array for name, array in arrays.items()}
    np.savez(buffer, **storable)  # type: ignore[arg-type]  # numpy's stubs know allow_pickle only
    return buffer.getvalue()


def arrays_from_bytes(content: bytes) -> dict[str, npt.NDArray[np.generic]]:
    """Invert ``arrays_to_bytes``."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return dict(arrays)
