"""Decodes values that petastorm packs into bytes: numpy arrays and images."""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sparkhvd.data.schema.data_schema import Codec, ColumnSpec
from sparkhvd.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Array = npt.NDArray[np.generic]

_INSTALL = "Install one of them: pip install pillow, or pip install opencv-python-headless."


def decode(packed: pa.Array, column: ColumnSpec, dtype: np.dtype[Any], shape: tuple[int, ...], what: str) -> Array:
    """Unpack the values of one column.

    Args:
        packed: binary values.
        column: its codec determines how the values are packed; its fill replaces NULL.
        dtype: the type that every value must have.
        shape: the shape that every value must have.
        what: the name of the column for error messages.

    Raises:
        DataError: a value cannot be unpacked, or has another type or shape; images need Pillow or OpenCV.
    """
    codec = column.codec
    assert codec is not None  # noqa: S101  (only columns with a codec are packed)
    unpack = _decoder(codec)
    rows = np.empty((len(packed), *shape), dtype)
    for index, value in enumerate(packed.to_pylist()):
        if value is None:
            rows[index] = column.fill
            continue
        try:
            row = unpack(value)
        except (ValueError, OSError, KeyError, EOFError, SyntaxError) as error:
            raise DataError(f"{what}: row {index} is not a valid {codec} ({error}).") from error
        if row.dtype != dtype or row.shape != shape:
            raise DataError(
                f"{what}: row {index} holds {row.dtype} of shape {list(row.shape)}, expected {dtype} of shape "
                f"{list(shape)}. All rows must have the same type and shape."
            )
        rows[index] = row
    return rows


def peek(value: bytes, codec: Codec) -> Array:
    """Unpack one value, to determine its type and shape."""
    unpack = _decoder(codec)
    return np.asarray(unpack(value))


def _ndarray(value: bytes) -> Array:
    return np.asarray(np.load(io.BytesIO(value), allow_pickle=False))


def _compressed(value: bytes) -> Array:
    with np.load(io.BytesIO(value), allow_pickle=False) as archive:
        return np.asarray(archive["arr"])


def _image_decoder() -> Callable[[bytes], Array]:
    """Return a decoder by Pillow or else OpenCV, for images with one channel or RGB."""
    try:
        pillow = import_module("PIL.Image")
    except ImportError:
        pass
    else:
        return lambda value: _by_pillow(pillow, value)
    try:
        opencv = import_module("cv2")
    except ImportError as error:
        raise DataError(f"Compressed images need Pillow or OpenCV, and neither is installed. {_INSTALL}") from error
    return lambda value: _by_opencv(opencv, value)


def _by_pillow(pillow: Any, value: bytes) -> Array:
    with pillow.open(io.BytesIO(value)) as image:
        pixels = np.asarray(image)
        # Some versions of Pillow open 16-bit gray images with 32 bits.
        return pixels.astype(np.uint16) if image.mode.startswith("I") and pixels.dtype != np.uint16 else pixels


def _by_opencv(opencv: Any, value: bytes) -> Array:
    pixels = opencv.imdecode(np.frombuffer(value, np.uint8), opencv.IMREAD_UNCHANGED)
    if pixels is None:
        raise ValueError("OpenCV does not recognize the image format")
    return np.asarray(opencv.cvtColor(pixels, opencv.COLOR_BGR2RGB) if pixels.ndim == 3 else pixels)


def _decoder(codec: Codec) -> Callable[[bytes], Array]:
    if codec == "image":
        return _image_decoder()
    return _ndarray if codec == "ndarray" else _compressed
