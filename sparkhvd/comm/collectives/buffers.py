"""Memory as the core sees it: an address, a shape and an element type."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from sparkhvd.errors import ConfigError

# The element types that the core supports, and the bytes of an element.
BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
DTYPES = frozenset(BYTES)

Array = npt.NDArray[np.generic]


class ReduceOp(StrEnum):
    """How an allreduce combines the values of the ranks."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ConfigError(f"op must be Average, Sum, Min, Max, Product or Adasum of hvd, got {value!r}.")


class Buffer(NamedTuple):
    """Contiguous memory that a collective reads or writes; a named tuple, because every tensor needs one.

    Attributes:
        address: the address of the first element.
        shape: elements per dimension, row-major.
        dtype: one of ``DTYPES``.
        owner: keeps the memory alive; an operation holds it until nothing uses the memory.
        device: for memory of a CUDA device, the device's number and the address of the stream whose work makes the
            memory ready; None for memory of the host.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    owner: object
    device: tuple[int, int] | None = None


def label_of(what: str, name: str | None) -> str:
    """Return the label of a tensor or array in error messages."""
    return f"{what} {name!r}" if name else f"The {what.lower()}"


def buffer_of(array: Array, what: str) -> Buffer:
    """Return the memory of a C-contiguous array, without a copy.

    Raises:
        ConfigError: the core does not support the element type or its byte order, or the array is masked or not
            contiguous. The message names the array ``what``.
    """
    refuse_mask(array, what)
    if array.dtype.name not in DTYPES:
        raise ConfigError(f"{what} has dtype {array.dtype}; collectives take {', '.join(sorted(DTYPES))}.")
    if not array.dtype.isnative:  # dtype.name is the same for both byte orders
        raise ConfigError(f"{what} has dtype {array.dtype.str}, whose byte order is not this machine's; convert it.")
    if not array.flags.c_contiguous:
        raise ConfigError(f"{what} of shape {array.shape} is not contiguous; pass numpy.ascontiguousarray(array).")
    return Buffer(array.ctypes.data, array.shape, array.dtype.name, array)


def refuse_mask(values: object, what: str) -> None:
    """Refuse a masked array: the core reads its memory, including the masked elements.

    Raises:
        ConfigError: the values are a masked array. The message names them ``what``.
    """
    # Without this module, which NumPy imports on first use, there are no masked arrays. The import takes 20 ms.
    if isinstance(values, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        raise ConfigError(f"{what} is a masked array, whose mask would be lost. Pass filled(), or data and mask.")


def as_bytes(array: Array) -> Array:
    """Return a C-contiguous array, as bytes if collectives do not support its dtype: for moves without arithmetic.

    ``from_bytes`` reverses this. Arrays of objects have no bytes to send and are returned unchanged.
    """
    if array.dtype.name in DTYPES or array.dtype.hasobject:
        return array
    return array.reshape(-1).view(np.uint8)


def from_bytes(content: Array, like: Array) -> Array:
    """Return the array whose ``as_bytes`` is ``content``; it has the dtype and the shape of ``like``."""
    return content if content.dtype == like.dtype else content.view(like.dtype).reshape(like.shape)
