from __future__ import annotations

import gc

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparkhvd.data.read import arrow_memory
from sparkhvd.data.schema.data_schema import ColumnSpec

NUMBERS = ColumnSpec("numbers", "float32", (3,), "feature", "array")
DATES = ColumnSpec("dates", "datetime64[us]", (), "feature", "scalar")
TEXTS = ColumnSpec("texts", "str", (), "feature", "scalar")


@pytest.mark.parametrize(
    "holder",
    [lambda array: array[10:20], lambda array: torch.from_numpy(array[5:]), lambda array: memoryview(array[1:2])],
    ids=["view", "tensor", "buffer"],
)
def test_memory_returns_to_the_pool_with_its_last_part(holder):
    gc.collect()  # frees objects of other tests in reference cycles
    before = pa.total_allocated_bytes()
    array = arrow_memory.empty(NUMBERS, 2_000_000)  # far more than other threads may allocate and free
    assert (array.shape, array.dtype) == ((2_000_000, 3), np.float32)
    array[:] = 1
    held = holder(array)
    del array
    gc.collect()
    assert pa.total_allocated_bytes() - before >= 20_000_000
    assert float(np.asarray(held).min()) == float(np.asarray(held).max()) == 1
    del held
    assert pa.total_allocated_bytes() - before < 4_000_000


@pytest.mark.parametrize("column", [NUMBERS, DATES, TEXTS], ids=["numbers", "dates", "texts"])
@pytest.mark.parametrize("rows", [0, 5])
def test_every_column_has_its_own_type_and_shape(column, rows):
    array = arrow_memory.empty(column, rows)
    assert array.shape == (rows, *column.shape)
    assert array.dtype == (object if column is TEXTS else column.dtype)
    assert array.flags.writeable
    assert array.flags.c_contiguous
