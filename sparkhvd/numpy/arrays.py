"""Access to the values of arrays and of everything that NumPy can read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
    _refuse_missing(values, what)
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


def _refuse_missing(values: object, what: str) -> None:
    """Raise an error if some of the values are masked or null; NumPy would read nulls as NaN."""
    if isinstance(values, list | tuple):
        for part in values:
            if not isinstance(part, float | int):
                _refuse_missing(part, what)
        return
    refuse_mask(values, what)
    if isinstance(values, np.ndarray):
        return
    for where, column in _columns(values):
        if count := _null_count(column):
            nulls = "1 null value" if count == 1 else f"{count} null values"
            raise ConfigError(
                f"{what}, a {type(values).__name__}, has {nulls}{where}, which NumPy would read as NaN. Replace nulls "
                "first: fill_null() of Arrow or fillna() of pandas."
            )


def _columns(values: Any) -> Iterable[tuple[str, object]]:
    """Return the columns of a table, each with its place in error messages; or the values themselves."""
    columns: Iterable[tuple[object, object]]
    if hasattr(values, "column_names"):  # tables and record batches of Arrow
        columns = zip(values.column_names, values.columns, strict=True)
    elif hasattr(values, "get_columns"):  # Polars
        columns = zip(values.columns, values.get_columns(), strict=True)
    elif hasattr(values, "isna") and values.ndim == 2:  # pandas
        columns = values.items()
    else:
        return [("", values)]
    return ((f" in column {name!r}", column) for name, column in columns)


def _null_count(values: Any) -> int:
    """Return the number of nulls in an array of Arrow, Polars or pandas; a NaN is none of them. 0 for other values."""
    if hasattr(values, "is_null"):
        # Not null_count, which excludes nulls in the values of dictionaries and of runs.
        return int(np.count_nonzero(values.is_null()))
    if not hasattr(values, "isna"):
        return 0
    # pandas: a NumPy dtype has no nulls, and a sparse array has those of its subtype.
    is_numpy = isinstance(getattr(values.dtype, "subtype", values.dtype), np.dtype)
    return 0 if is_numpy else int(np.count_nonzero(values.isna()))


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
