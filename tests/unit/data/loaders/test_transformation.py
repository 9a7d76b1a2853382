from __future__ import annotations

import numpy as np
import pytest

from sparkhvd.data.loaders.transformation import transformed
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.errors import DataError

SCHEMA = DataSchema(
    (
        ColumnSpec("text", "str", (), "feature", "scalar"),
        ColumnSpec("v", "float64", (3,), "feature", "vector"),
        ColumnSpec("y", "int64", (), "label", "scalar"),
    )
)
ROWS = {"text": np.array(["a", "bb"], object), "v": np.zeros((2, 3)), "y": np.array([0, 1])}


def lengths(columns):
    columns["v"] += 1
    size = np.array([len(text) for text in columns["text"]], "float32")
    return {"text": np.stack([size, size], axis=1), "v": columns["v"], "y": columns["y"], "more": size}


def test_the_columns_are_those_that_the_function_returns():
    schema, rows = transformed(SCHEMA, lengths, ROWS)
    text, vector, label = schema.columns
    assert (text.dtype, text.shape, text.kind, text.depth, text.role) == ("float32", (2,), "array", 1, "feature")
    assert (vector, label) == SCHEMA.columns[1:], "unchanged columns keep their kind"
    assert rows["text"].tolist() == [[1, 1], [2, 2]]
    assert not ROWS["v"].any(), "the function received a copy"


def test_columns_may_be_replaced_where_the_training_takes_any_columns():
    def ids(columns):
        return {"target": columns["y"], "y": columns["y"], "ids": np.array([[1, 0], [2, 3]])}

    schema, rows = transformed(SCHEMA, ids, ROWS, any_columns=True)
    shown = [(column.name, column.dtype, column.shape, column.role, column.kind) for column in schema.columns]
    assert shown == [
        ("target", "int64", (), "feature", "scalar"),
        ("ids", "int64", (2,), "feature", "array"),
        ("y", "int64", (), "label", "scalar"),
    ]
    assert list(rows) == ["target", "y", "ids"]
    with pytest.raises(DataError, match=r"returned shape \[1\] for 2 rows of column 'ids'"):
        transformed(SCHEMA, lambda columns: {"ids": columns["y"][:1]}, ROWS, any_columns=True)
    with pytest.raises(DataError, match="returned no columns"):
        transformed(SCHEMA, lambda columns: {}, ROWS, any_columns=True)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda c: {"text": c["y"]}, r"returned the columns \['text'\] without 'v', which is a feature column"),
        (lambda c: {**lengths(c), "y": c["y"][:1]}, r"returned shape \[1\] for 2 rows of column 'y'"),
        (lambda c: c, "returned column 'text' as object; convert it to a number"),
        (lambda c: c["nothing"], r"raised KeyError: 'nothing'. It was called with text: object\[2\], v: float64"),
        (lambda c: None, "raised AttributeError"),
    ],
)
def test_results_that_cannot_be_trained_on_are_refused_with_the_column(function, message):
    with pytest.raises(DataError, match=message):
        transformed(SCHEMA, function, ROWS)
