from __future__ import annotations

import re
import time

import pytest
from pyspark.ml.linalg import MatrixUDT, VectorUDT
from pyspark.sql import types as t

from sparkhvd.data import ColumnSpec, Selection, schema_of, select
from sparkhvd.data.schema.selection import with_fields
from sparkhvd.errors import SchemaError

SCALARS = {
    "bool": t.BooleanType(),
    "int8": t.ByteType(),
    "int16": t.ShortType(),
    "int32": t.IntegerType(),
    "int64": t.LongType(),
    "float32": t.FloatType(),
    "float64": t.DoubleType(),
}


def struct(**columns):
    return t.StructType([t.StructField(name, spark_type) for name, spark_type in columns.items()])


PLAIN = struct(x=t.FloatType(), z=t.DoubleType(), y=t.LongType(), w=t.DoubleType(), held=t.BooleanType())


def refused(message, schema=PLAIN, **options):
    with pytest.raises(SchemaError, match=message):
        select(schema, **{"feature_cols": ["x"], "label_cols": ["y"], **options})


@pytest.mark.parametrize("dtype", SCALARS)
def test_every_supported_type_keeps_its_type(dtype):
    schema = struct(s=SCALARS[dtype], a=t.ArrayType(SCALARS[dtype]), y=t.LongType())
    found = schema_of(schema, ["s", "a"], ["y"])
    assert found["s"] == ColumnSpec("s", dtype, (), "feature", "scalar")
    assert found["a"] == ColumnSpec("a", dtype, None, "feature", "array")


def test_a_vector_becomes_an_array_of_doubles():
    found = schema_of(struct(v=VectorUDT(), y=t.LongType()), ["v"], ["y"])
    assert found["v"] == ColumnSpec("v", "float64", None, "feature", "vector")


def test_columns_are_ordered_as_features_labels_and_weight():
    selection = select(PLAIN, feature_cols=["z", "x"], label_cols=["y"], weight_col="w", validation="held")
    assert selection.schema.names() == ["z", "x", "y", "w"]
    assert [column.role for column in selection.schema.columns] == ["feature", "feature", "label", "weight"]
    assert selection.validation == "held"


def test_without_feature_cols_all_other_columns_are_features():
    selection = select(PLAIN, feature_cols=None, label_cols=["y"], weight_col="w", validation="held")
    assert [column.name for column in selection.schema.of("feature")] == ["x", "z"]
    assert [column.name for column in schema_of(PLAIN, None, []).of("feature")] == PLAIN.names


@pytest.mark.parametrize(("given", "kept"), [(None, None), (0, None), (0.0, None), (0.25, 0.25)])
def test_a_fraction_of_zero_means_no_validation(given, kept):
    schema = schema_of(PLAIN, ["x"], ["y"])
    assert select(PLAIN, feature_cols=["x"], label_cols=["y"], validation=given) == Selection(schema, kept)


@pytest.mark.parametrize("fraction", [1, 1.0, -0.1, float("nan"), float("inf")])
def test_a_fraction_out_of_range_is_refused(fraction):
    refused(r"The validation fraction .* is not in \[0, 1\)", validation=fraction)


@pytest.mark.parametrize("validation", [True, ["held"], b"held"])
def test_a_validation_that_is_neither_a_fraction_nor_a_name_is_refused(validation):
    refused(r"validation is .*; it must be a fraction in \[0, 1\), a column name or None", validation=validation)


def test_a_missing_column_is_named_with_the_existing_columns():
    refused(r"There is no column 'xx' \(requested as feature\)\. .*The DataFrame has 'x', 'z'", feature_cols=["xx"])
    refused(r"There is no column 'yy' \(requested as label\)\. Did you mean 'y'\?", label_cols=["yy"])
    refused(r"There is no column 'hold' \(requested as validation\)\. Did you mean 'held'\?", validation="hold")
    refused(r"There is no column 'ww' \(requested as weight\)", weight_col="ww")


@pytest.mark.parametrize(
    ("quoted", "plain"), [("`x`", "x"), ("`a.b`", "a.b"), ("`s`.`x`", "s.x"), ("s.`x.y`", "s.x.y"), ("`a``b`", "a`b")]
)
@pytest.mark.parametrize(
    ("use", "selected"),
    [
        ("feature", lambda name: {"feature_cols": [name]}),
        ("label", lambda name: {"label_cols": [name]}),
        ("weight", lambda name: {"weight_col": name}),
        ("validation", lambda name: {"validation": name}),
    ],
)
def test_names_in_backticks_are_refused_with_the_plain_name(quoted, plain, use, selected):
    message = f"There is no column {quoted!r} (requested as {use}). Write {plain!r}, without backticks"
    refused(re.escape(message), **selected(quoted))


def test_a_wide_dataframe_is_listed_in_part():
    wide = struct(**{f"c{index}": t.LongType() for index in range(100)})
    refused(r"'c0', .*'c29' and 70 more", schema=wide, feature_cols=["nothing"], label_cols=[])


NEEDS_A_FUNCTION = [
    (t.StringType(), "str", "the type string, which cannot be a feature of a model: index or encode it"),
    (t.VarcharType(9), "str", "the type string"),
    (t.BinaryType(), "bytes", "the type binary.*decode it"),
    (t.DateType(), "datetime64[D]", "the type date.*unix_date"),
    (t.TimestampType(), "datetime64[us]", "the type timestamp.*unix_micros"),
    (t.TimestampNTZType(), "datetime64[us]", "the type timestamp.*unix_micros"),
    (t.DecimalType(38, 18), "decimal", "the type decimal.*cast it to double if you accept the rounding"),
    (t.ArrayType(t.StringType()), "str", "the type string"),
]


@pytest.mark.parametrize(("spark_type", "dtype", "message"), NEEDS_A_FUNCTION)
def test_columns_without_numbers_are_refused_unless_a_function_transforms_them(spark_type, dtype, message):
    schema = struct(bad=spark_type, y=t.LongType())
    refused(rf"Column 'bad' has .*{message}", schema=schema, feature_cols=["bad"])
    found = select(schema, feature_cols=["bad"], label_cols=["y"], transformed=True).schema["bad"]
    assert (found.dtype, found.is_number) == (dtype, False)


@pytest.mark.parametrize(
    ("spark_type", "message"),
    [
        (t.MapType(t.StringType(), t.LongType()), "the type map.*: its keys differ .*select the values"),
        (t.ArrayType(t.StructType([t.StructField("a", t.LongType())])), "a struct inside an array.*select its fields"),
        (t.ArrayType(VectorUDT()), "a vector inside an array"),
        (t.StructType([]), "it has no fields"),
        (t.StructType([t.StructField("a", t.NullType())]), "a' has the type void.*only NULL"),
        (MatrixUDT(), "numpy has no equivalent type"),
        (t.DayTimeIntervalType(), "the type interval.*numpy has no equivalent type"),
        (t.NullType(), "it holds only NULL"),
    ],
)
def test_an_unsupported_type_is_refused_with_the_reason_and_the_supported_types(spark_type, message):
    schema = struct(bad=spark_type, y=t.LongType())
    refused(rf"Column 'bad.*{message}", schema=schema, feature_cols=["bad"], transformed=True)
    refused("The supported types are boolean, byte", schema=schema, feature_cols=["bad"], transformed=True)


def test_decimals_become_the_type_that_can_hold_them():
    schema = struct(a=t.DecimalType(18, 0), b=t.DecimalType(15, 4), c=t.ArrayType(t.DecimalType(5, 1)))
    assert [column.dtype for column in schema_of(schema, None, ()).columns] == ["int64", "float64", "float64"]


def test_the_depth_of_nested_arrays_is_known():
    nested = t.ArrayType(t.ArrayType(t.ArrayType(t.FloatType())))
    found = schema_of(struct(x=nested), ["x"], ())["x"]
    assert (found.dtype, found.kind, found.depth, found.shape) == ("float32", "array", 3, None)


def test_the_fields_of_a_struct_become_separate_columns():
    inner = t.StructType([t.StructField("p", t.ArrayType(t.FloatType())), t.StructField("q", t.BooleanType())])
    schema = struct(s=t.StructType([t.StructField("a", t.LongType()), t.StructField("in", inner)]), y=t.LongType())
    found = schema_of(schema, ["s"], ["y"])
    assert found.names() == ["s.a", "s.in.p", "s.in.q", "y"]
    assert [column.path for column in found.of("feature")] == [("s", "a"), ("s", "in", "p"), ("s", "in", "q")]
    clash = struct(s=t.StructType([t.StructField("a", t.LongType())]), **{"s.a": t.LongType()})
    refused(r"Column 's\.a' is selected more than once", schema=clash, feature_cols=["s", "s.a"], label_cols=[])


def test_only_selected_vectors_can_be_sparse():
    schema = struct(v=VectorUDT(), x=t.FloatType(), y=t.LongType())
    assert select(schema, feature_cols=["v"], label_cols=["y"], sparse_cols=["v"]).schema["v"].sparse
    refused(
        r"sparse_cols names 'x', which is not a selected vector column; expected one of \['v'\]",
        schema=schema,
        feature_cols=["v", "x"],
        sparse_cols=["x"],
    )
    refused(
        "in both sparse_cols and fill, but a sparse column cannot be filled",
        schema=schema,
        feature_cols=["v"],
        sparse_cols=["v"],
        fill={"v": 0.0},
    )


@pytest.mark.parametrize(
    ("spark_type", "good", "bad"),
    [
        (t.ByteType(), [-128, 5], [128, 1.5, True, "1", float("nan")]),
        (t.LongType(), [2**63 - 1], [2**63, 10**400, "x"]),
        (t.FloatType(), [0.1, 3, float("nan"), -float("inf")], [2**24 + 1, 1e300, 10**400, "1.0", False]),
        (t.DoubleType(), [1e300], [10**400]),
        (t.BooleanType(), [True], [1, 0.0]),
        (t.StringType(), ["", "x"], [1]),
        (t.DateType(), ["2020-02-29"], ["2020-02-30", 5]),
        (t.TimestampType(), ["2020-02-29T01:02:03.5"], ["soon", "NaT"]),
        (t.ArrayType(t.IntegerType()), [7], [7.5]),
        (t.DecimalType(5, 2), [0.123], ["1"]),
        (t.DecimalType(38, 5), [1, 0.5], ["1", float("nan"), 10**400]),
    ],
)
def test_a_fill_must_be_of_the_columns_type(spark_type, good, bad):
    schema = struct(x=spark_type, y=t.LongType())
    for fill in good:
        found = (
            select(schema, feature_cols=["x"], label_cols=["y"], fill={"x": fill}, transformed=True).schema["x"].fill
        )
        assert found == fill or fill != fill  # noqa: PLR0124  (NaN)
    for fill in bad:
        refused("The fill value .* does not fit column 'x' of type", schema=schema, fill={"x": fill}, transformed=True)
    refused(
        r"fill names 'z', which is not a selected column; expected one of \['x', 'y'\]",
        schema=schema,
        fill={"z": 0},
        transformed=True,
    )


def test_a_column_selected_twice_is_refused():
    message = "Column 'x' is selected more than once"
    refused(message, feature_cols=["x", "x"])
    refused(message, label_cols=["x"])
    refused(message, weight_col="x")
    refused("Column 'held' is selected more than once", feature_cols=["held"], validation="held")


def test_names_that_spark_cannot_distinguish_are_refused():
    twice = t.StructType([t.StructField("x", t.LongType()), t.StructField("X", t.LongType())])
    refused("Column 'x' .* is ambiguous: the DataFrame has 'x', 'X'", schema=twice, label_cols=[])
    same = t.StructType([t.StructField("x", t.LongType()), t.StructField("x", t.LongType())])
    refused("Column 'x' .* is ambiguous", schema=same, label_cols=[])


def test_a_reserved_name_is_refused():
    schema = struct(sparkhvd_split=t.LongType(), y=t.LongType())
    refused("names that start with 'sparkhvd_' are reserved", schema=schema, feature_cols=["sparkhvd_split"])


def test_a_string_instead_of_a_list_and_an_empty_list_are_refused():
    refused(r"feature_cols is the string 'x'; pass a list of column names: \['x'\]", feature_cols="x")
    refused("label_cols is the string 'y'", label_cols="y")
    refused("No feature column is selected", feature_cols=[])
    refused("The feature column 3 is not a string", feature_cols=[3])


def test_a_weight_that_is_not_one_number_is_refused():
    schema = struct(x=t.LongType(), y=t.LongType(), w=t.ArrayType(t.DoubleType()))
    refused("Column 'w' has the type array<double>; a weight is one number per row", schema=schema, weight_col="w")
    refused("Column 'held' has the type boolean; a weight is one number per row", weight_col="held")


def test_a_validation_column_must_be_boolean_or_a_number():
    schema = struct(x=t.LongType(), y=t.LongType(), v=t.StringType())
    refused("Validation column 'v' has the type string; it must be boolean, or a number", schema=schema, validation="v")


def test_a_field_of_a_struct_is_selected_by_its_path():
    inner = struct(b=t.FloatType(), deep=struct(c=t.DoubleType()))
    schema = t.StructType([*struct(s=inner).fields, *struct(**{"d.t": inner, "s.x": t.LongType()}).fields])
    found = schema_of(schema, ["s.deep", "d.t.b", "s.x"], ["s.b"])
    assert [column.path for column in found.columns] == [("s", "deep", "c"), ("d.t", "b"), ("s.x",), ("s", "b")]
    assert found.names() == ["s.deep.c", "d.t.b", "s.x", "s.b"]
    refused("There is no column 's.q'", schema, feature_cols=["s.q"], label_cols=["s.x"])
    refused("'s.b' is selected more than once", schema, feature_cols=["s"], label_cols=["s.b"])
    refused(
        "'s.x' is a field of a struct",
        struct(x=t.LongType(), s=struct(x=t.LongType()), y=t.LongType()),
        validation="s.x",
    )


def test_ten_thousand_columns_are_selected_within_a_second():
    schema = struct(**{f"c{number}": t.DoubleType() for number in range(10_000)})
    start = time.process_time()
    found = select(schema, feature_cols=schema.names[1:], label_cols=["c0"], fill={"c7": 1.0})
    assert time.process_time() - start < 1
    assert len(found.schema.columns) == 10_000


def test_the_fields_of_a_struct_replace_it():
    schema = struct(s=struct(a=t.LongType(), deep=struct(b=t.LongType())), x=t.LongType())
    assert with_fields(schema, ["x", "s", "q"]) == ("x", "s.a", "s.deep.b", "q")
    assert with_fields(schema, ["s.deep", "s.a"]) == ("s.deep.b", "s.a")


DOUBLE = t.DoubleType()
NESTED = struct(a=DOUBLE, s=struct(b=DOUBLE, c=struct(d=DOUBLE)), y=DOUBLE, held=t.BooleanType())


def test_upper_and_lower_case_do_not_count_and_a_column_has_the_name_that_the_user_wrote():
    chosen = select(NESTED, feature_cols=["A", "S"], label_cols=["Y"], validation="HELD").schema
    assert chosen.names() == ["A", "S.b", "S.c.d", "Y"]
    assert [column.path for column in chosen.columns] == [("a",), ("s", "b"), ("s", "c", "d"), ("y",)]
    assert schema_of(NESTED, ["S.B"], ())["S.B"].path == ("s", "b")
    assert with_fields(NESTED, ["S", "A", "S.B"]) == ("S.b", "S.c.d", "A", "S.B")


def test_without_feature_cols_a_label_in_another_case_is_no_feature():
    assert schema_of(NESTED, None, ("Y",), validation="Held").names() == ["a", "s.b", "s.c.d", "Y"]


def test_a_column_selected_twice_in_another_case_is_refused():
    refused("Column 'X' is selected more than once", feature_cols=["x", "X"])


@pytest.mark.parametrize("name", ["A", "S.b", "s.B"])
def test_case_counts_if_it_does_for_spark(name):
    refused(f"There is no column '{name}'", NESTED, feature_cols=[name], case_sensitive=True)
    assert with_fields(NESTED, ["S"], case_sensitive=True) == ("S",)
    own = select(NESTED, feature_cols=None, label_cols=["y"], case_sensitive=True).schema
    assert own.names() == ["a", "s.b", "s.c.d", "held", "y"]


def test_a_name_with_several_spellings_is_ambiguous_in_any_case():
    refused(
        "Column 'AB' .* is ambiguous: the DataFrame has 'aB', 'Ab'",
        struct(aB=DOUBLE, Ab=DOUBLE, y=DOUBLE),
        feature_cols=["AB"],
    )
