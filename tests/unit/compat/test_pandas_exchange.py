"""Arrow arrays that the serializers of Spark 3.5 and 4.0 convert through pandas."""

from __future__ import annotations

import decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from sparkhvd.compat.pandas_exchange import SentColumn, from_pandas, to_pandas

NAN = float("nan")


def converted_by_spark(result, kind):
    """Return the array that Spark's serializer creates from a result."""

    def one(series, kind):
        series = series.apply(lambda value: value if value is None else list(value))  # Spark converts arrays like this
        mask = None if hasattr(series.array, "__arrow_array__") else series.isnull()
        return pa.Array.from_pandas(series, mask=mask, type=kind, safe=True)

    if not pa.types.is_struct(kind):
        return one(result, kind)
    assert isinstance(result, pd.DataFrame)
    return pa.StructArray.from_arrays([one(result[field.name], field.type) for field in kind], fields=list(kind))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1.0, NAN, None], pa.float32()),
        ([2**62 + 1, None], pa.int64()),
        ([[1.0, NAN], [None, 2.0], None], pa.list_(pa.float64())),
        ([[[NAN]], [[1.0, None]]], pa.list_(pa.list_(pa.float32()))),
        (["a", None], pa.string()),
        (
            [{"no": NAN, "yes": [1.0]}, {"no": None, "yes": [NAN]}],
            pa.struct({"no": pa.float32(), "yes": pa.list_(pa.float32())}),
        ),
        ([{"output_0": {"no": NAN}}], pa.struct({"output_0": pa.struct({"no": pa.float64()})})),
        ([], pa.list_(pa.float64())),
    ],
    ids=str,
)
def test_results_reach_spark_unchanged(values, kind):
    array = pa.array(values, kind)
    result = to_pandas(array)
    assert len(result) == len(array)
    assert str(converted_by_spark(result, kind).to_pylist()) == str(values)


def series(*values, dtype=None):
    return pd.Series(list(values), dtype=dtype)


NUMBER = SentColumn("number", True, pa.int64())
ARRAY = SentColumn("array", True, pa.list_(pa.float32()))


@pytest.mark.parametrize(
    ("column", "parts", "values"),
    [
        (SentColumn("number", False, pa.float32()), [series(1.0, NAN, dtype="float32")], [1.0, NAN]),
        (NUMBER, [series(2**62 + 1, 0), series(False, True)], [2**62 + 1, None]),
        (NUMBER, [series(dtype="int64"), series(dtype="object")], []),
        (
            SentColumn("array", False, pa.list_(pa.float32())),
            [series(np.array([NAN, 1], "f4"), None)],
            [[NAN, 1.0], None],
        ),
        (
            ARRAY,
            [
                series(np.array([NAN, 0], "f4"), np.array([1, NAN], "f4"), None),
                series(np.array([False, True]), None, None),
            ],
            [[NAN, None], [1.0, NAN], None],
        ),
        (
            SentColumn("array", True, pa.list_(pa.list_(pa.int64()))),
            [
                series(np.array([np.array([2**62 + 1]), np.array([0, 5])], dtype=object)),
                series(np.array([np.array([False]), np.array([True, False])], dtype=object)),
            ],
            [[[2**62 + 1], [None, 5]]],
        ),
        (SentColumn("object", True, pa.bool_()), [series(True, None)], [True, None]),
        (
            SentColumn("object", True, pa.decimal128(5, 2)),
            [series(decimal.Decimal("1.25"), None)],
            [decimal.Decimal("1.25"), None],
        ),
        (
            SentColumn(
                "struct",
                True,
                pa.struct({"a": pa.int64(), "b": pa.string()}),
                (NUMBER, SentColumn("object", True, pa.string())),
            ),
            [series(False, True), series(7, 0), series(False, True), series("x", None)],
            [{"a": 7, "b": "x"}, None],
        ),
    ],
    ids=str,
)
def test_null_nan_and_large_integers_arrive_as_they_were_sent(column, parts, values):
    unrelated = SentColumn("number", False, pa.int8())
    (array, last) = from_pandas([column, unrelated], [*parts, pd.Series(np.ones(len(values), "int8"))])
    assert array.type == column.arrow
    assert str(array.to_pylist()) == str(values)
    assert last.to_pylist() == [1] * len(values)
