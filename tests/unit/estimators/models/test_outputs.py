from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from sparkhvd.data.schema.data_schema import ColumnSpec
from sparkhvd.errors import ModelOutputError, ParamError
from sparkhvd.estimators.models.outputs import (
    OutputColumn,
    OutputSpec,
    check_types,
    encode_output,
    output_column,
    with_rows,
)
from sparkhvd.estimators.models.predict import device_number

SCORES = OutputSpec((3,), "float64", vector=True)
NUMBER = OutputSpec((1,), "float32", vector=False)
VALUES = np.array([[0.1, 0.7, 0.2], [0.6, 0.3, 0.1]], np.float32)


def label(dtype, kind="scalar", shape=()):
    return ColumnSpec("y", dtype, shape, "label", kind)


@pytest.mark.parametrize(
    ("kind", "known", "label_column", "expected"),
    [
        ("auto", SCORES, None, OutputColumn("o", "array<double>", vector=True, shape=(3,))),
        ("auto", NUMBER, None, OutputColumn("o", "float", shape=(1,))),
        ("scalar", NUMBER, None, OutputColumn("o", "float", shape=(1,))),
        ("scalar", None, None, OutputColumn("o", "double")),
        (
            "array",
            OutputSpec((2, 3), "float64", vector=True),
            None,
            OutputColumn("o", "array<array<float>>", shape=(2, 3)),
        ),
        ("array<int>", SCORES, None, OutputColumn("o", "array<int>", shape=(3,))),
        ("label", SCORES, label("int32"), OutputColumn("o", "int", shape=(3,), best=True)),
        ("label", NUMBER, label("float32"), OutputColumn("o", "float", shape=(1,), best=True)),
        ("label", SCORES, label("int64", "array", (3,)), OutputColumn("o", "array<bigint>", shape=(3,))),
        (
            "label",
            SCORES,
            label("float64", "vector", (3,)),
            OutputColumn("o", "array<double>", vector=True, shape=(3,)),
        ),
    ],
)
def test_the_requested_type_decides_the_type_of_the_column(kind, known, label_column, expected):
    assert output_column("o", kind, known, label_column) == expected


@pytest.mark.parametrize(
    ("kind", "known", "message"),
    [
        ("scalar", SCORES, r"has the type 'double', one value per row, but the output has rows of shape \[3\]"),
        ("int", SCORES, r"'o' has the type 'int', one value per row, but the output has rows of shape \[3\]"),
        ("label", SCORES, "has no label column for it"),
        ("auto", None, "prediction_fn changes the model's outputs"),
    ],
)
def test_types_that_an_output_cannot_have_are_refused(kind, known, message):
    with pytest.raises(ParamError, match=message):
        output_column("o", kind, known, None)


@pytest.mark.parametrize(
    ("values", "column", "arrow", "expected"),
    [
        (VALUES[:, :1], OutputColumn("o", "float"), pa.float32(), VALUES[:, 0].tolist()),
        (np.array([0.6, 1.4]), OutputColumn("o", "int"), pa.int32(), [1, 1]),
        (np.array([0.4, 0.6]), OutputColumn("o", "boolean"), pa.bool_(), [False, True]),
        (np.array([-1, 0, 2]), OutputColumn("o", "boolean"), pa.bool_(), [False, False, True]),
        (VALUES, OutputColumn("o", "int", best=True), pa.int32(), [1, 0]),
        (np.array([[2.0], [3.0]]), OutputColumn("o", "int", best=True), pa.int32(), [2, 3]),
        (
            np.arange(8).reshape(2, 2, 2),
            OutputColumn("o", ""),
            pa.list_(pa.list_(pa.int64())),
            [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
        ),
        (
            np.arange(8).reshape(2, 2, 2),
            OutputColumn("o", "", vector=True),
            pa.list_(pa.float64()),
            [[0, 1, 2, 3], [4, 5, 6, 7]],
        ),
        (
            np.array([[1, 2]]),
            OutputColumn("o", ""),
            pa.struct({"no": pa.int8(), "yes": pa.float64()}),
            [{"no": 1, "yes": 2.0}],
        ),
        (
            {"b": np.array(["x"]), "a": np.array([[1.5]])},
            OutputColumn("o", ""),
            pa.struct({"a": pa.list_(pa.float32()), "b": pa.string()}),
            [{"a": [1.5], "b": "x"}],
        ),
        (np.array(["x", None, 1]), OutputColumn("o", "string"), pa.string(), ["x", None, "1"]),
        (np.zeros((0, 3)), OutputColumn("o", ""), pa.list_(pa.float32()), []),
    ],
)
def test_values_become_arrow_arrays_of_the_type(values, column, arrow, expected):
    encoded = encode_output(values, column, arrow)
    encoded.validate(full=True)
    assert encoded.type == arrow
    assert encoded.to_pylist() == expected


@pytest.mark.parametrize(
    ("values", "column", "arrow", "expected"),
    [
        (
            [[1.4], [np.nan], [127.4], [127.6], [-129.0]],
            OutputColumn("o", "tinyint"),
            pa.int8(),
            [1, None, 127] + [None] * 2,
        ),
        ([[np.nan], [2.0**63], [-(2.0**63)]], OutputColumn("o", "bigint"), pa.int64(), [None, None, -(2**63)]),
        ([[0.1, 0.9], [np.nan, 0.9]], OutputColumn("o", "int", best=True), pa.int32(), [1, None]),
        ([[0.1, 0.9], [np.nan, 0.9]], OutputColumn("o", "boolean", best=True), pa.bool_(), [True, None]),
        ([[0.4], [0.6], [-3], [np.nan]], OutputColumn("o", "boolean"), pa.bool_(), [False, True, False, None]),
        ([[0.1, 0.9], [np.nan, 0.9]], OutputColumn("o", "array<int>"), pa.list_(pa.int32()), [[0, 1], [None, 1]]),
    ],
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_values_that_an_integer_type_cannot_hold_are_null(values, column, arrow, expected, dtype):
    with np.errstate(over="ignore"):
        values = np.array(values, dtype)
    encoded = encode_output(values, column, arrow).to_pylist()
    if dtype is np.float16 and column.type == "bigint":
        expected = [None, None, None]  # these values are infinite
    assert encoded == expected


def test_the_largest_integers_are_exact():
    greatest = [2**63 - 1, -(2**63), 2**63 - 2]
    assert encode_output(np.array(greatest)[:, None], OutputColumn("o", "bigint"), pa.int64()).to_pylist() == greatest


@pytest.mark.parametrize(
    ("values", "column", "arrow", "message"),
    [
        (VALUES, OutputColumn("o", "double"), pa.float64(), r"cannot hold rows of shape \[3\]"),
        (
            VALUES,
            OutputColumn("o", "array<array<float>>"),
            pa.list_(pa.list_(pa.float32())),
            "cannot hold rows of shape",
        ),
        (VALUES, OutputColumn("o", "struct<a float>"), pa.struct({"a": pa.float32()}), "cannot hold rows of shape"),
        (
            VALUES,
            OutputColumn("o", "float", shape=(1,)),
            pa.float32(),
            r"rows of shape \[3\], but their shape was \[1\]",
        ),
        (
            {"b": VALUES},
            OutputColumn("o", "struct<a float>"),
            pa.struct({"a": pa.float32()}),
            r"returned the fields \['b'\]",
        ),
        (VALUES * 1j, OutputColumn("o", "array<float>"), pa.list_(pa.float32()), "returned complex numbers"),
        ({"b": VALUES}, OutputColumn("o", "float"), pa.float32(), r"returned the fields \['b'\]"),
        (np.array([b"a", b"b"]), OutputColumn("o", "string"), pa.string(), "'o' has the type 'string', .* bytes"),
        (np.array(["a", b"b"], object), OutputColumn("o", "string"), pa.string(), "returned bytes"),
        (np.array(["a", "b"]), OutputColumn("o", "int"), pa.int32(), r"'o' has the type 'int', .* type str\. Return"),
        (np.array(["a", 1], object), OutputColumn("o", "float"), pa.float32(), r"of type int and str\. Return only"),
        (np.array([1, None]), OutputColumn("o", "boolean"), pa.bool_(), "values of type NoneType and int"),
    ],
)
def test_values_that_do_not_fit_the_type_are_refused(values, column, arrow, message):
    with pytest.raises(ModelOutputError, match=message):
        encode_output(values, column, arrow)


@pytest.mark.parametrize(
    ("shape", "output", "rows", "expected"),
    [
        ((), np.array(2.0), 1, [2.0]),
        (None, np.array(2.0), 1, [2.0]),
        (None, {"a": np.array(2.0), "b": np.array([3.0])}, 1, {"a": [2.0], "b": [3.0]}),
        ((3,), np.arange(3), 1, [[0, 1, 2]]),
        ((1,), np.array([2.0]), 1, [[2.0]]),
        ((), np.array([2.0]), 1, [2.0]),
        ((2,), np.array([[1, 2]]), 1, [[1, 2]]),
        ((2,), np.array([1, 2]), 2, [1, 2]),
    ],
)
def test_an_output_that_lost_the_dimension_of_a_single_row_gets_it_back(shape, output, rows, expected):
    found = with_rows(output, OutputColumn("o", "double", shape=shape), rows)
    as_lists = {name: values.tolist() for name, values in found.items()} if isinstance(found, dict) else found.tolist()
    assert as_lists == expected


def test_one_number_for_several_rows_is_refused():
    with pytest.raises(ModelOutputError, match=r"'o': the model returned a single number for 2 rows; the first dim"):
        with_rows(np.array(2.0), OutputColumn("o", "double"), 2)


def test_the_gpu_of_a_task_has_the_index_that_cuda_uses():
    assert device_number(["2"], None) == 2
    assert device_number(["GPU-b"], "GPU-a, GPU-b") == 1
    assert device_number(["GPU-b"], None) is None
    assert device_number([], "0") is None


def test_types_are_checked_against_the_known_outputs_and_labels():
    with pytest.raises(ParamError, match="'p' has the type 'double', one value per row"):
        check_types(["o", "p"], ["auto", "double"], [NUMBER, SCORES], [label("int32")] * 2)
    check_types(["o", "p"], ["auto", "label"], [], [])
