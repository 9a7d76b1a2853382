from __future__ import annotations

import datetime
import io
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkhvd.data import ColumnSpec, DataSchema
from sparkhvd.data.schema import columns
from sparkhvd.data.schema.columns import to_numpy
from sparkhvd.errors import DataError

VECTOR = pa.struct(
    [
        pa.field("type", pa.int8()),
        pa.field("size", pa.int32()),
        pa.field("indices", pa.list_(pa.int32())),
        pa.field("values", pa.list_(pa.float64())),
    ]
)


def spec(dtype, shape=(), kind=None, **more):
    return ColumnSpec("c", dtype, shape, "feature", kind or ("array" if shape else "scalar"), **more)


def dense(*values):
    return {"type": 1, "size": None, "indices": None, "values": list(values)}


def sparse(size, **entries):
    places = sorted(int(name[1:]) for name in entries)
    return {"type": 0, "size": size, "indices": places, "values": [entries[f"_{place}"] for place in places]}


@pytest.mark.parametrize(
    ("array", "column", "message"),
    [
        (pa.array([1, None]), ColumnSpec("c", "int64", (), "feature", "scalar"), "'c' in here contains NULL"),
        (
            pa.array([1, 2]),
            ColumnSpec("c", "int32", (), "feature", "scalar"),
            "has the type int64, but the manifest says int32",
        ),
        (pa.array(["a"]), ColumnSpec("c", "int32", (), "feature", "scalar"), "has the type string"),
        (pa.array([[1.0], [2.0, 3.0, 4.0]]), ColumnSpec("c", "float64", (2,), "feature", "array"), "length 1 to 3"),
        (pa.array([[1.0, None]]), ColumnSpec("c", "float64", (2,), "feature", "array"), "contains NULL"),
        (pa.array([[1.0, 2.0], None]), ColumnSpec("c", "float64", (2,), "feature", "array"), "contains NULL"),
        (pa.array([1.0, 2.0]), ColumnSpec("c", "float64", (2,), "feature", "array"), "of shape"),
        (pa.array([1.0]), ColumnSpec("c", "float64", None, "feature", "array"), "The shape of column 'c' is unknown"),
    ],
)
def test_values_that_contradict_the_manifest_are_refused(array, column, message):
    with pytest.raises(DataError, match=message):
        to_numpy(array, column, "here")


def test_a_slice_of_an_arrow_array_is_converted_from_its_own_rows():
    array = pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).slice(1, 1)
    converted = to_numpy(array, ColumnSpec("c", "float64", (2,), "feature", "array"), "here")
    assert converted.tolist() == [[3.0, 4.0]]


NUMBERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]


@pytest.mark.parametrize("dtype", NUMBERS)
def test_numbers_keep_their_type_and_share_arrows_memory(dtype):
    values = np.arange(6, dtype=dtype)
    array = pa.array(values)
    converted = to_numpy(array, spec(dtype), "here")
    assert converted.dtype == np.dtype(dtype)
    assert converted.ctypes.data == array.buffers()[1].address
    rows = to_numpy(pa.FixedSizeListArray.from_arrays(array, 3), spec(dtype, (3,)), "here")
    np.testing.assert_array_equal(rows, values.reshape(2, 3))
    rows = to_numpy(pa.ListArray.from_arrays([0, 2, 4, 6], array), spec(dtype, (2,)), "here")
    assert rows.ctypes.data == array.buffers()[1].address


@settings(deadline=None, max_examples=60)
@given(st.data(), st.lists(st.integers(1, 3), max_size=3), st.integers(0, 5), st.booleans())
def test_nested_arrays_of_any_fixed_shape_arrive_with_null_filled(data, shape, rows, nullable):
    shape = tuple(shape)
    values = np.arange(rows * int(np.prod(shape)), dtype=np.int32).reshape(rows, *shape)
    wanted, nested = values.copy(), values.tolist()
    arrow = pa.int32()
    for _ in shape:
        arrow = pa.list_(arrow)
    if nullable and rows:
        # NULL in place of a row, an inner array or an element: the fill replaces everything below it.
        position = tuple(data.draw(st.integers(0, size - 1)) for size in (rows, *shape))
        position = position[: data.draw(st.integers(1, len(position)))]
        inside = nested
        for index in position[:-1]:
            inside = inside[index]
        inside[position[-1]] = None
        wanted[position] = -5
    converted = to_numpy(pa.array(nested, arrow), spec("int32", shape, fill=-5), "here")
    np.testing.assert_array_equal(converted, wanted)
    assert converted.dtype == np.int32


@pytest.mark.parametrize(
    ("values", "arrow", "column", "wanted"),
    [
        ([1.5, None], pa.float32(), spec("float32", fill=0.25), np.array([1.5, 0.25], "float32")),
        ([True, None], pa.bool_(), spec("bool", fill=False), np.array([True, False])),
        (["a", None], pa.string(), spec("str", fill="?"), np.array(["a", "?"], object)),
        (["a", "b", "a"], pa.dictionary(pa.int8(), pa.string()), spec("str"), np.array(["a", "b", "a"], object)),
        ([b"a", None], pa.binary(), spec("bytes", fill="?"), np.array([b"a", b"?"], object)),
        ([["a", "b"]], pa.list_(pa.large_string()), spec("str", (2,)), np.array([["a", "b"]], object)),
        ([Decimal("1.50"), None], pa.decimal128(4, 2), spec("float64", fill=0.25), np.array([1.5, 0.25])),
        # A fill may have more digits than the column's decimals.
        ([Decimal("1.50"), None], pa.decimal128(4, 2), spec("float64", fill=0.123), np.array([1.5, 0.123])),
        ([Decimal("12"), None], pa.decimal128(4, 0), spec("int64", fill=-12345), np.array([12, -12345])),
        (
            [Decimal(10) ** 29, None],
            pa.decimal128(38, 0),
            spec("decimal", fill=2.5),
            np.array([Decimal(10) ** 29, Decimal("2.5")], object),
        ),
        (
            [datetime.date(1969, 12, 31), None],
            pa.date32(),
            spec("datetime64[D]", fill="2020-02-29"),
            np.array(["1969-12-31", "2020-02-29"], "datetime64[D]"),
        ),
        (
            [datetime.datetime(2020, 1, 1, 1, 2, 3, 4), None],  # noqa: DTZ001
            pa.timestamp("us", "UTC"),
            spec("datetime64[us]", fill="1970-01-01T00:00:01"),
            np.array(["2020-01-01T01:02:03.000004", "1970-01-01T00:00:01"], "datetime64[us]"),
        ),
        ([1, None], pa.int64(), spec("datetime64[us]", fill="1970-01-02"), np.array([1, 86_400_000_000], "M8[us]")),
    ],
)
def test_every_other_type_arrives_as_documented(values, arrow, column, wanted):
    converted = to_numpy(pa.array(values, arrow), column, "here")
    assert converted.dtype == wanted.dtype == columns.array_type(column)
    assert converted.tolist() == wanted.tolist()
    padded = pa.array([values[0], *values], arrow).slice(1)
    assert to_numpy(padded, column, "here").tolist() == wanted.tolist()


@settings(deadline=None)
@given(st.lists(st.integers(-(10**15) + 1, 10**15 - 1), min_size=1), st.integers(0, 15))
def test_a_decimal_of_up_to_15_digits_becomes_the_nearest_double(digits, scale):
    decimals = [Decimal(value).scaleb(-scale) for value in digits]
    column = spec(columns.decimal_dtype(15, scale))
    converted = to_numpy(pa.array(decimals, pa.decimal128(15, scale)), column, "here")
    assert converted.tolist() == [float(value) if scale else int(value) for value in decimals]


def test_a_decimal_that_no_float_can_hold_stays_a_decimal():
    assert [columns.decimal_dtype(p, s) for p, s in [(18, 0), (19, 0), (15, 15), (16, 1), (5, -2)]] == [
        "int64",
        "decimal",
        "float64",
        "decimal",
        "decimal",
    ]


VECTORS = [dense(1.0, 0.0, -2.0), sparse(3, _1=4.0), dense(0.0, 0.0, 0.0), sparse(3), sparse(3, _0=5.0, _2=0.0)]
ELEMENTS = [[1, 0, -2], [0, 4, 0], [0, 0, 0], [0, 0, 0], [5, 0, 0]]


def test_dense_and_sparse_vectors_arrive_with_all_elements():
    converted = to_numpy(pa.array(VECTORS, VECTOR), spec("float64", (3,), "vector"), "here")
    assert converted.tolist() == ELEMENTS
    array = pa.array([None, *VECTORS, None], VECTOR).slice(1)
    converted = to_numpy(array, spec("float64", (3,), "vector", fill=7.0), "here")
    assert converted.tolist() == [*ELEMENTS, [7, 7, 7]]
    assert columns.lengths(array).tolist() == [3, 3, 3, 3, 3, 0]


def test_dense_vectors_share_arrows_memory():
    array = pa.array([dense(1.0, 2.0), dense(3.0, 4.0)], VECTOR)
    converted = to_numpy(array, spec("float64", (2,), "vector"), "here")
    assert converted.tolist() == [[1, 2], [3, 4]]
    assert converted.ctypes.data == array.field("values").values.buffers()[1].address


def test_sparse_vectors_arrive_as_entries_and_can_be_indexed_like_rows():
    column = spec("float64", (3,), "vector", sparse=True, entries=2)
    converted = to_numpy(pa.array(VECTORS, VECTOR), column, "here")
    assert converted.shape == (5,)
    assert columns.to_dense(converted, column).tolist() == ELEMENTS
    rows, places, values = columns.coordinates(converted)
    assert list(zip(rows, places, values, strict=True)) == [(0, 0, 1), (0, 2, -2), (1, 1, 4), (4, 0, 5), (4, 2, 0)]
    room = columns.empty(column, 3)
    room[:2], room[2:] = converted[3:], np.take(converted, [0], axis=0)
    assert columns.to_dense(room, column).tolist() == [ELEMENTS[3], ELEMENTS[4], ELEMENTS[0]]
    assert columns.to_dense(columns.blank(column, 2), column).tolist() == [[0, 0, 0]] * 2


@pytest.mark.parametrize(
    ("vectors", "more", "message"),
    [
        ([dense(1.0)], {}, "has vectors of length 1, expected 3. All vectors of a column must"),
        ([sparse(4, _0=1.0)], {}, "has vectors of length 4, expected 3"),
        ([None], {}, "'c' in here contains NULL"),
        ([sparse(3, _3=1.0)], {}, "has vector indices outside 0 to 2; the data are damaged"),
        (
            [dense(1.0, 2.0, 3.0)],
            {"sparse": True, "entries": 2},
            "has a row of 3 entries, but the manifest says at most 2",
        ),
    ],
)
def test_vectors_that_contradict_the_manifest_are_refused(vectors, more, message):
    with pytest.raises(DataError, match=message):
        to_numpy(pa.array(vectors, VECTOR), spec("float64", (3,), "vector", **more), "here")


def test_the_field_of_a_struct_is_read_from_its_struct():
    batch = pa.record_batch({"s": pa.array([{"a": {"b": 1.5}}, {"a": {"b": 2.5}}]), "s.a.b": pa.array([7.0, 8.0])})
    inside = ColumnSpec("s.a.b", "float64", (), "feature", "scalar", source=("s", "a", "b"))
    flat = ColumnSpec("s.a.b", "float64", (), "feature", "scalar")
    assert columns.decode(batch, inside, "here").tolist() == [1.5, 2.5]
    assert columns.decode(batch, flat, "here").tolist() == [7.0, 8.0]
    assert columns.stored_names(DataSchema((inside,))) == ["s.a.b"]


def test_a_null_struct_is_null_in_its_fields():
    batch = pa.record_batch({"s": pa.array([{"a": 1}, None])})
    column = ColumnSpec("s.a", "int64", (), "feature", "scalar", source=("s", "a"), fill=9)
    assert columns.decode(batch, column, "here").tolist() == [1, 9]


def saved(array, compressed=False):
    file = io.BytesIO()
    np.savez_compressed(file, arr=array) if compressed else np.save(file, array)
    return file.getvalue()


def test_packed_arrays_are_unpacked_and_checked():
    rows = [np.arange(6, dtype=np.int16).reshape(2, 3) * factor for factor in (1, 2)]
    for codec, compressed in [("ndarray", False), ("compressed_ndarray", True)]:
        packed = pa.array([saved(row, compressed) for row in rows])
        converted = to_numpy(packed, spec("int16", (2, 3), codec=codec), "here")
        np.testing.assert_array_equal(converted, rows)
        with pytest.raises(DataError, match=r"row 0 holds int16 of shape \[2, 3\], expected int32 of shape \[3, 2\]"):
            to_numpy(packed, spec("int32", (3, 2), codec=codec), "here")
        with pytest.raises(DataError, match=f"row 0 is not a valid {codec}"):
            to_numpy(pa.array([b"damaged"]), spec("int16", (2, 3), codec=codec), "here")


def test_a_packed_array_never_unpickles():
    packed = pa.array([saved(np.array([{"a": 1}], object))])
    with pytest.raises(DataError, match=r"row 0 is not a valid ndarray .*pickle"):
        to_numpy(packed, spec("int16", (1,), codec="ndarray"), "here")
