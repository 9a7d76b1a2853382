from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from sparkhvd.errors import ConfigError
from sparkhvd.numpy.arrays import array_of

INDICES = pa.array([0, 1])
WITH_NULLS = {
    "an array of Arrow": (pa.array([1, None, None]), "a Int64Array, has 2 null values, which"),
    "a dictionary of Arrow with a null": (
        pa.DictionaryArray.from_arrays(INDICES, pa.array([5, None])),
        "a DictionaryArray, has 1 null value, which",
    ),
    "runs of Arrow": (pc.run_end_encode(pa.array([1, None])), "a RunEndEncodedArray, has 1 null value, which"),
    "a table of Arrow": (pa.table({"a": [1, 2], "b": [1, None]}), "a Table, has 1 null value in column 'b', which"),
    "a record batch of Arrow": (pa.record_batch({"a": [1.0, None]}), "a RecordBatch, has 1 null value in column 'a'"),
    "integers of pandas": (pd.array([1, None], dtype="Int64"), "a IntegerArray, has 1 null value, which"),
    "booleans of pandas": (pd.array([True, None], dtype="boolean"), "a BooleanArray, has 1 null value, which"),
    "a column of pandas": (pd.Series([1, None], dtype="Float32"), "a Series, has 1 null value, which"),
    "an index of pandas": (pd.Index([1, None], dtype="Int64"), "a Index, has 1 null value, which"),
    "Arrow in pandas": (pd.Series([1, None], dtype="int64[pyarrow]"), "a Series, has 1 null value, which"),
    "categories of pandas": (pd.Categorical([1, None]), "a Categorical, has 1 null value, which"),
    "a frame of pandas": (
        pd.DataFrame({"a": [1.0, np.nan], "b": pd.array([1, None], dtype="Int64")}),
        "a DataFrame, has 1 null value in column 'b', which",
    ),
    "arrays in a list": ([pa.array([1]), pa.array([None], pa.int64())], "a Int64Array, has 1 null value, which"),
    "arrays in nested lists": (([1.0], [pd.array([None], dtype="Int64")]), "a IntegerArray, has 1 null value, which"),
    "masks in nested lists": ([[np.ma.masked_array([1.0], [True])]], "is a masked array, whose mask would be lost"),
}
WITHOUT_NULLS = {
    "an array of Arrow": (pa.array([1, 2], pa.int32()), np.array([1, 2], np.int32)),
    "NaNs of Arrow": (pa.array([1.0, np.nan]), np.array([1.0, np.nan])),
    "a table of Arrow": (pa.table({"a": [1], "b": [2]}), np.array([[1, 2]])),
    "integers of pandas": (pd.array([1, 2], dtype="Int16"), np.array([1, 2], np.int16)),
    "booleans of pandas": (pd.Series([True, False], dtype="boolean"), np.array([True, False])),
    "NaNs of pandas": (pd.Series([1.0, np.nan]), np.array([1.0, np.nan])),
    "NaNs in a sparse array": (pd.arrays.SparseArray([1.0, np.nan]), np.array([1.0, np.nan])),
    "a frame of pandas": (pd.DataFrame({"a": [1.0], "b": [np.nan]}), np.array([[1.0, np.nan]])),
}


@pytest.mark.parametrize(("values", "message"), WITH_NULLS.values(), ids=WITH_NULLS)
def test_values_that_are_null_or_masked_are_refused(values, message):
    with pytest.raises(ConfigError) as refusal:
        array_of(values, "The array")
    assert str(refusal.value).startswith("The array")
    assert message in str(refusal.value)


def test_the_error_of_a_null_says_what_to_do():
    with pytest.raises(ConfigError, match=r"NumPy would read as NaN\. Replace nulls first: fill_null\(\) of Arrow or"):
        array_of(pa.array([1, None]), "The array")


@pytest.mark.parametrize(("values", "expected"), WITHOUT_NULLS.values(), ids=WITHOUT_NULLS)
def test_values_without_nulls_keep_their_dtype(values, expected):
    array = array_of(values, "The array")
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)
