"""Access to the values of arrays and of everything that NumPy can read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sparkhvd.comm.collectives.buffers import DTYPES, Array, refuse_mask
from sparkhvd.errors import ConfigError

Writable = Array | bytearray | memoryview


def array_of(values: npt.ArrayLike, what: str) -> Array:
    """Return an array with the values, which shares their memory where that is possible.

    Args:
        values: an array, a number, a list, or an object with the buffer protocol, ``__array__`` or DLPack.
        what: names the values in error messages.

    Raises:
        ConfigError: NumPy cannot read the values, some of them are masked or null, or collectives do not support their
            dtype.
    """
    for part in (values, *(values if isinstance(values, list | tuple) else ())):
        refuse_mask(part, what)
    if nulls := getattr(values, "null_count", 0):  # of Arrow; NumPy would read them as NaN
        raise ConfigError(f"{what}, a {type(values).__name__}, has null_count {nulls}. Replace them with fill_null().")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as problem:
        array = _from_device(values, what, problem)
    if array.dtype.name not in DTYPES:
        raise ConfigError(
            f"{what} has dtype {array.dtype}; collectives take {', '.join(sorted(DTYPES))}. Convert it, view it as one "
            "of them, or send it with broadcast_object() or allgather_object()."
        )
    return array


def _from_device(values: npt.ArrayLike, what: str, problem: Exception) -> Array:
    """Return a copy of values that NumPy cannot read in place, such as those in the memory of a GPU."""
    # DLPack of PyTorch loses the sign of a tensor that is negated lazily.
    resolve = getattr(values, "resolve_neg", None)
    resolved: npt.ArrayLike = values if resolve is None else resolve()
    try:
        return np.from_dlpack(resolved, device="cpu")  # type: ignore[arg-type]  # values without DLPack raise an error
    except (AttributeError, TypeError, ValueError, RuntimeError, BufferError):
        raise ConfigError(
            f"{what}, a {type(values).__name__}, cannot be read as an array: {problem}. Convert it to a NumPy array "
            "first."
        ) from problem


def writable_array_of(memory: Writable, what: str) -> Array:
    """Return an array whose memory is that of ``memory``.

    Args:
        memory: an array, or another object with a writable buffer.
        what: names it in error messages.

    Raises:
        ConfigError: a collective cannot write into it.
    """
    if isinstance(memory, np.ndarray):
        array = array_of(memory, what)
    else:
        try:
            array = array_of(np.asarray(memoryview(memory)), what)
        except TypeError:
            raise ConfigError(
                f"{what}, a {type(memory).__name__}, has no memory that a collective can write into. Pass a NumPy "
                "array, or use the form without the underscore."
            ) from None
    problems = {
        "read-only": not array.flags.writeable,
        "not contiguous": not array.flags.c_contiguous,
        "not in this machine's byte order": not array.dtype.isnative,
    }
    for problem, applies in problems.items():
        if applies:
            raise ConfigError(
                f"{what} of shape {array.shape} and dtype {array.dtype.str} is {problem}, so a collective cannot write "
                "into its memory. Use the form without the underscore, or copy the array."
            )
    return array
