"""Write TensorBoard's event files without TensorBoard.

A file is a sequence of records, each ``length, masked CRC-32C of the length, content, masked CRC-32C of the content``,
all little-endian (TFRecord, https://www.tensorflow.org/tutorials/load_data/tfrecord). The content is a protocol buffer:

- ``Event``: wall time (field 1, double), step (2, varint), file version (3, string), summary (5, ``Summary``).
- ``Summary``: values (field 1, repeated ``Value``).
- ``Value``: tag (field 1, string), simple value (2, float).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

_VERSION = b"brain.Event:2"
_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reflected
_MASK = 0xA282EAD8


def event_file(wall_time: float, step: int, values: Mapping[str, float]) -> bytes:
    """Return a complete event file with one step.

    Args:
        wall_time: seconds since 1970.
        step: the step, for example the number of the epoch.
        values: numbers by tag.
    """
    summary = b"".join(
        _message(0x0A, _message(0x0A, tag.encode()) + b"\x15" + _float32(value)) for tag, value in values.items()
    )
    time = b"\x09" + struct.pack("<d", wall_time)
    return _record(time + _message(0x1A, _VERSION)) + _record(time + b"\x10" + _varint(step) + _message(0x2A, summary))


def crc32c(content: bytes) -> int:
    """Return the CRC-32C of ``content``, computed bit by bit because event files are small."""
    register = 0xFFFFFFFF
    for byte in content:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (_POLYNOMIAL if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def _float32(value: float) -> bytes:
    """Return a number as a 32-bit float; infinity if it is too large."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def _record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + _masked(length) + content + _masked(content)


def _masked(content: bytes) -> bytes:
    crc = crc32c(content)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF)


def _message(key: int, content: bytes) -> bytes:
    return bytes([key]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])
