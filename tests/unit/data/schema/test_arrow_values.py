"""Views of Arrow arrays as numpy arrays."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from sparkhvd.data.schema.arrow_values import to_values

_NUMBERS = [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]
_FLOATS = [pa.float16(), pa.float32(), pa.float64()]
_TIMES = [pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("us", "Europe/Paris"), pa.timestamp("ns")]
_OTHERS = [pa.string(), pa.binary(), pa.date32(), pa.decimal128(5, 2), pa.duration("us"), pa.null()]


def _arrays(arrow):
    types = pa.types
    values = np.arange(40) % (2 if types.is_boolean(arrow) else 13)
    if types.is_null(arrow):
        array = pa.nulls(40)
    elif types.is_floating(arrow):
        array = pa.array((values / 4).astype(arrow.to_pandas_dtype()))
    elif types.is_string(arrow) or types.is_binary(arrow):
        array = pa.array([str(value).encode() for value in values]).cast(arrow)
    elif types.is_decimal(arrow):
        array = pa.array([Decimal(int(value)) / 4 for value in values], arrow)
    else:
        array = pa.array(values.astype(np.int32 if types.is_date(arrow) else np.int64)).cast(arrow)
    with_null = pa.array([None, *array.to_pylist()], arrow)
    return [array, array[9:], array[7:30], array[:0], array[40:], with_null, with_null[1:], with_null[1:1]]


@pytest.mark.parametrize("arrow", [*_NUMBERS, *_FLOATS, *_TIMES, *_OTHERS, pa.bool_()], ids=str)
def test_values_of_slices_equal_those_of_pyarrow(arrow):
    for array in _arrays(arrow):
        expected, values = array.to_numpy(zero_copy_only=False), to_values(array)
        assert values.dtype == expected.dtype
        np.testing.assert_array_equal(values, expected)


def test_numbers_are_not_copied_and_cannot_be_changed():
    memory = pa.py_buffer(bytearray(np.arange(4, dtype=np.int32).tobytes()))
    array = pa.Array.from_buffers(pa.int32(), 4, [None, memory])
    values = to_values(array[1:])
    assert values.ctypes.data == memory.address + 4
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1


def test_the_memory_outlives_its_array():
    values = to_values(pa.array(np.arange(1000.0)))
    assert values.sum() == 499500.0


_WITHOUT_PANDAS = """
import sys
import numpy as np
import pyarrow as pa
from sparkhvd.data.schema.columns import to_numpy
from sparkhvd.data.schema.data_schema import ColumnSpec
memory = [None, pa.py_buffer(np.arange(3.0).tobytes())]
array = pa.Array.from_buffers(pa.float64(), 3, memory)  # pa.array() would import pandas
print(to_numpy(array, ColumnSpec("x", "float64", (), "feature", "scalar"), "the test"))
print("pandas" in sys.modules)
"""


def test_numbers_are_read_without_an_import_of_pandas():
    command = [sys.executable, "-c", _WITHOUT_PANDAS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[0. 1. 2.]\nFalse\n", done.stderr
