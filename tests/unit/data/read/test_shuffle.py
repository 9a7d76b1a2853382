from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkhvd.data import ColumnSpec, DataSchema
from sparkhvd.data.read.shuffle import column_groups, shuffle_rows
from sparkhvd.data.schema import columns

KINDS = [
    ("bool", ()),
    ("int8", ()),
    ("int16", (3,)),
    ("float32", ()),
    ("float32", (2,)),
    ("float64", (2, 5)),
    ("int64", ()),
    ("datetime64[us]", ()),
    ("str", ()),
    ("decimal", ()),
]


def schema_of(kinds, *, sparse=False):
    specs = [
        ColumnSpec(f"c{place}", kind, shape, "feature", "array" if shape else "scalar")
        for place, (kind, shape) in enumerate(kinds)
    ]
    vector = [ColumnSpec("v", "float64", (9,), "feature", "vector", sparse=True, entries=2)] if sparse else []
    return DataSchema((*specs, *vector))


def rows_of(schema, count, random):
    arrays = {}
    for column in schema.columns:
        numbers = random.integers(0, 2 if column.dtype == "bool" else 100, (count, *columns.row_shape(column)))
        if column.sparse:
            arrays[column.name] = np.zeros(count, columns.array_type(column))
            arrays[column.name]["indices"] = random.integers(0, 9, (count, 2))
            arrays[column.name]["values"] = random.random((count, 2))
        elif column.dtype in {"str", "decimal"}:
            arrays[column.name] = np.array(
                [{"str": str, "decimal": Decimal}[column.dtype](int(x)) for x in numbers], object
            )
        else:
            arrays[column.name] = numbers.astype(column.dtype)
    return arrays


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=12),
    sparse=st.booleans(),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    share=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_rows_are_returned_in_the_requested_order(kinds, sparse, lengths, share, seed):
    schema, random, total = schema_of(kinds, sparse=sparse), np.random.default_rng(seed), sum(lengths)
    whole = rows_of(schema, total, random)
    order = random.permutation(total)[: round(share * total)]
    ends = np.cumsum([0, *lengths])
    parts = [{name: array[start:stop] for name, array in whole.items()} for start, stop in pairwise(ends)]
    with ThreadPoolExecutor(2) as threads:
        shuffled = shuffle_rows(parts, order, schema, threads)
    assert list(shuffled) == schema.names()
    for column in schema.columns:
        array = shuffled[column.name]
        np.testing.assert_array_equal(array, whole[column.name][order])
        assert array.dtype == columns.array_type(column)
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert not np.shares_memory(array, whole[column.name])
    assert share == 0 or not len(order) or all(part == {} for part in parts), "the picked rows are released"


def test_columns_with_equal_row_sizes_are_gathered_together():
    schema = schema_of([("float32", ())] * 5 + [("int64", ()), ("str", ()), ("float32", (2,)), ("float64", (4,))] * 2)
    names = [[column.name for column in group] for group in column_groups(schema)]
    assert names == [
        ["c0", "c1", "c2", "c3"],
        ["c4"],
        ["c5", "c7", "c9", "c11"],
        ["c6"],
        ["c10"],
        ["c8"],
        ["c12"],
    ]


def test_parts_of_another_length_than_their_first_column_are_an_error():
    schema = schema_of([("float32", ())] * 2)
    parts = [{"c0": np.zeros(3, np.float32), "c1": np.zeros(2, np.float32)}]
    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(Exception, match="the parts of every column must hold 3 rows of 4 bytes"),
    ):
        shuffle_rows(parts, np.arange(3), schema, threads)
