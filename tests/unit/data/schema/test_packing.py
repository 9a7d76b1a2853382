from __future__ import annotations

import numpy as np
import pyarrow as pa
from pyspark.sql import types as t

from sparkhvd.data import schema_of
from sparkhvd.data.schema.packing import ColumnPacking, plan_packing, unpacked


def test_only_scalars_of_one_type_are_packed_together():
    kinds = {
        "f": t.FloatType(),
        "d": t.DoubleType(),
        "whole": t.DecimalType(10, 0),  # int64 for a model, but not bigint for Spark
        "g": t.FloatType(),
        "i": t.LongType(),
        "s": t.StructType([t.StructField("inner", t.DoubleType())]),
        "a": t.ArrayType(t.FloatType()),
        "j": t.LongType(),
        "b": t.BooleanType(),
    }
    schema = t.StructType([t.StructField(name, kind) for name, kind in kinds.items()])
    columns = schema_of(schema, list(kinds), ()).columns
    assert plan_packing(schema, columns) == ColumnPacking(((0, 3), (4, 7)), (1, 2, 5, 6, 8))
    assert plan_packing(schema, columns[:2]) == ColumnPacking((), (0, 1))
    assert plan_packing(schema, [columns[0], columns[3]]) == ColumnPacking(((0, 1),), ())


def test_packed_scalars_are_unpacked_in_order_into_separate_memory():
    whole = pa.array([[9.0, 9.0], [1.0, 10.0], [2.0, 20.0], [3.0, 30.0]], pa.list_(pa.float32()))
    others = pa.StructArray.from_arrays([pa.array(["a", "b", "c"]), pa.array([True, None, False])], ["x", "y"])
    first, text, second, switch = unpacked([whole[1:], others], ColumnPacking(((0, 2),), (1, 3)))
    assert first.dtype == second.dtype == np.float32
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [10, 20, 30])
    assert (text.to_pylist(), switch.to_pylist()) == (["a", "b", "c"], [True, None, False])
    for array in (first, second):
        assert array.flags.writeable
        assert array.flags.c_contiguous
    assert [len(array) for array in unpacked([whole[:0], others[:0]], ColumnPacking(((0, 2),), (1, 3)))] == [0] * 4


def test_null_stays_in_its_column():
    lists = pa.array([[1, 10], [None, 20], [3, 30]], pa.list_(pa.int64()))
    first, second = unpacked([lists], ColumnPacking(((0, 1),), ()))
    assert (first.to_pylist(), first.null_count) == ([1, None, 3], 1)
    assert (second.to_pylist(), second.null_count) == ([10, 20, 30], 0)
