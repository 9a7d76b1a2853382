"""The rows that a validation fraction holds out depend only on the values of features and labels."""

from __future__ import annotations

import math

import pytest
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import SparseVector, Vectors, VectorUDT
from pyspark.sql import functions
from pyspark.sql.types import ArrayType, DoubleType, IntegerType, StringType, StructField, StructType

from sparkhvd.data.prepare.prepare import rows_to_write
from sparkhvd.data.prepare.validation_split import WIDE
from sparkhvd.data.schema.selection import select

ROWS = 60


def split(df, features=None, labels=("y",), *, compress=False, **options):
    """Return the split of each row, in the order of ``df``."""
    selection = select(df.schema, feature_cols=features, label_cols=labels, validation=0.5, transformed=True, **options)
    rows = rows_to_write(df, selection, 7, compress=compress).collect()
    return [row["sparkhvd_split"] for row in rows]


def values(row):
    """Return three numbers, some of which are 0."""
    return [float(row % 5), 0.0, row / 7.0]


@pytest.fixture(scope="module")
def plain(spark):
    rows = [(row, values(row), float(row)) for row in range(ROWS)]
    return spark.createDataFrame(rows, "id long, x array<double>, y double").coalesce(1)


@pytest.fixture(scope="module")
def expected(plain):
    sides = split(plain, ["x"])
    assert 15 < sides.count("validation") < 45
    return sides


def as_vectors(spark, vector):
    rows = [(vector(row), float(row)) for row in range(ROWS)]
    schema = StructType([StructField("x", VectorUDT()), StructField("y", DoubleType())])
    return spark.createDataFrame(rows, schema).coalesce(1)


def sparse(row):
    present = [(place, value) for place, value in enumerate(values(row)) if value != 0]
    return SparseVector(3, present)


def mixed(row):
    return sparse(row) if row % 2 else Vectors.dense(values(row))


def with_stored_zeros(row):
    return SparseVector(3, [0, 1, 2], values(row))


@pytest.mark.parametrize("vector", [sparse, mixed, with_stored_zeros])
@pytest.mark.parametrize("compress", [False, True])
def test_vectors_are_held_out_as_arrays_of_the_same_values(spark, expected, vector, compress):
    assert split(as_vectors(spark, vector), ["x"], compress=compress) == expected


def test_the_split_does_not_depend_on_number_types(plain, expected):
    for kind in ("float", "int", "smallint", "decimal(10,2)"):
        assert split(plain.withColumn("y", functions.col("y").cast(kind)), ["x"]) == expected, kind
    halves = plain.withColumn("x", functions.transform("x", lambda value: functions.round(value * 2) / 2))
    assert split(halves.withColumn("x", functions.col("x").cast("array<float>")), ["x"]) == split(halves, ["x"])


def test_the_split_does_not_depend_on_weights_or_column_order(plain, expected):
    more = plain.withColumn("w", functions.rand(1)).withColumn("z", functions.lit(1.5))
    assert split(more, ["x"], weight_col="w") == expected
    three = split(more, ["x", "z"], ["y", "id"])
    assert three != expected
    assert split(more, ["z", "x"], ["id", "y"]) == three
    assert split(more.select("y", "id", "z", "x"), ["z", "x"], ["y", "id"], weight_col=None) == three


def test_a_column_named_like_the_split_is_ignored(plain, expected):
    assert split(plain.withColumn("sparkhvd_split", functions.lit("train")), ["x"]) == expected


def test_the_split_does_not_depend_on_the_order_of_struct_fields(plain):
    one = plain.select(functions.struct("x", "id").alias("s"), "y")
    other = plain.select(functions.struct("id", "x").alias("s"), "y")
    assert split(one, ["s"]) == split(other, ["s"])


def test_values_that_compare_equal_get_the_same_split(spark):
    rows = [(zero, float(row)) for row in range(ROWS) for zero in (0.0, -0.0)]
    sides = split(spark.createDataFrame(rows, "x double, y double").coalesce(1), ["x"])
    assert sides[::2] == sides[1::2]
    vectors = [(Vectors.dense([zero, 1.0]), float(row)) for row in range(ROWS) for zero in (0.0, -0.0)]
    schema = StructType([StructField("x", VectorUDT()), StructField("y", DoubleType())])
    sides = split(spark.createDataFrame(vectors, schema).coalesce(1), ["x"])
    assert sides[::2] == sides[1::2]
    nans = [([math.nan, 1.0], float(row)) for row in range(ROWS)]
    df = spark.createDataFrame(nans, "x array<double>, y double").coalesce(1)
    assert split(df, ["x"]) == split(df.withColumn("x", array_to_vector("x")), ["x"])


def test_a_null_gets_the_split_of_its_fill(spark):
    fields = [("a", IntegerType()), ("x", ArrayType(DoubleType())), ("t", StringType()), ("y", DoubleType())]
    schema = StructType([StructField(name, kind) for name, kind in fields])
    with_null = [(None, [None, 1.0], None, float(row)) for row in range(ROWS)]
    filled = [(3, [0.5, 1.0], "?", float(row)) for row in range(ROWS)]
    fill = {"a": 3, "x": 0.5, "t": "?"}
    splits = [
        split(spark.createDataFrame(rows, schema).coalesce(1), ["a", "x", "t"], fill=fill)
        for rows in (with_null, filled)
    ]
    assert splits[0] == splits[1]


def test_the_split_of_a_wide_vector_depends_on_its_entries(spark):
    width = WIDE + 1
    indices = [row * 3 % width for row in range(ROWS)]
    schema = StructType([StructField("x", VectorUDT()), StructField("y", DoubleType())])

    def sides(make):
        rows = [(make(index), 1.0) for index in indices]
        return split(spark.createDataFrame(rows, schema).coalesce(1), ["x"])

    def dense(index):
        return Vectors.dense([1.0 if other == index else 0.0 for other in range(width)])

    sparse = sides(lambda index: SparseVector(width, [index], [1.0]))
    assert 15 < sparse.count("validation") < 45  # the rows differ only in the index of one entry
    assert sides(dense) == sparse
    assert sides(lambda index: SparseVector(width, sorted({0, index}), [1.0] if not index else [0.0, 1.0])) == sparse


def test_a_null_vector_reaches_the_check_of_nulls(spark):
    schema = StructType([StructField("x", VectorUDT()), StructField("y", DoubleType())])
    assert len(split(spark.createDataFrame([(None, 1.0)], schema), ["x"])) == 1
