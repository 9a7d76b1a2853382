"""Columns are matched by position, struct fields by name."""

from __future__ import annotations

import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as t

from sparkhvd.data import schema_of
from sparkhvd.data.prepare.prepare import written_schema
from sparkhvd.errors import ParamError, SchemaError
from sparkhvd.estimators.models.feature_matching import match_features, pandas_column_names, with_sources


def struct(*fields: str, **nested: t.DataType) -> t.StructType:
    plain = [t.StructField(name, t.DoubleType()) for name in fields]
    return t.StructType(plain + [t.StructField(name, kind) for name, kind in nested.items()])


def trained_on(schema, names):
    """Return the feature columns of a fit on prepared rows."""
    return with_sources(written_schema(schema_of(schema, names, ())), names).of("feature")


TRAINED = trained_on(struct("x", s=struct("b", "a", deep=struct("q", "p"))), ["s", "x"])


def taken(schema, names=("s", "x"), trained=TRAINED):
    return [".".join(column.path) for column in match_features(schema, names, trained)]


def test_every_field_is_mapped_to_its_column():
    assert [column.source for column in TRAINED] == [("s", "b"), ("s", "a"), ("s", "deep.q"), ("s", "deep.p"), ()]


@pytest.mark.parametrize(
    "given",
    [
        struct("b", "a", deep=struct("q", "p")),
        struct("a", "b", deep=struct("p", "q")),
        struct("a", "more", "b", deep=struct("p", "r", "q")),
    ],
    ids=["the same", "another order", "more fields"],
)
def test_struct_fields_are_matched_by_name(given):
    assert taken(struct("x", s=given)) == ["s.b", "s.a", "s.deep.q", "s.deep.p", "x"]


def test_a_struct_may_have_another_name_and_its_fields_another_case():
    given = struct("x", other=struct("A", "B", deep=struct("P", "q")))
    assert taken(given, ("other", "x")) == ["other.B", "other.A", "other.deep.q", "other.deep.P", "x"]


def test_columns_are_found_in_any_case_unless_case_counts():
    given = struct("X", S=struct("b", "a", deep=struct("q", "p")))
    assert taken(given) == ["S.b", "S.a", "S.deep.q", "S.deep.p", "X"]
    assert [column.name for column in match_features(given, ("s", "x"), TRAINED)] == [one.name for one in TRAINED]
    with pytest.raises(SchemaError, match="There is no column 's'"):
        match_features(given, ("s", "x"), TRAINED, case_sensitive=True)


def test_a_selected_column_with_a_dot_is_not_a_field_of_the_struct_before_it():
    schema, names = t.StructType([*struct(s=struct("b", "a")), *struct("s.z")]), ["s", "s.z"]
    trained = trained_on(schema, names)
    assert [column.source for column in trained] == [("s", "b"), ("s", "a"), ()]
    assert [column.name for column in match_features(schema, names, trained)] == ["s.b", "s.a", "s.z"]


def test_fields_that_became_columns_are_matched_by_position():
    names = ("b", "a", "q", "p", "x")
    assert taken(struct(*sorted(names)), names) == list(names)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (struct("b", "c", deep=struct("q", "p")), r"'s' has no field 'a', which the model was trained on \(s.a\)"),
        (struct("b", "a", deep=struct("q")), r"no field 'deep.p', .* it has \['b', 'a', 'deep.q'\]"),
        (
            t.DoubleType(),
            "'s' is a number; the model was trained on a struct .'s'. with the fields .'b', 'a'",
        ),
    ],
)
def test_a_missing_field_is_refused_by_both_names(given, message):
    with pytest.raises(SchemaError, match=message):
        taken(struct("x", s=given))


def test_a_struct_of_one_field_is_not_a_plain_column():
    one = trained_on(struct(s=struct("a")), ["s"])
    assert taken(struct(s=struct("z", "a")), ["s"], one) == ["s.a"]
    with pytest.raises(SchemaError, match=r"no field 'a', which the model was trained on \(s.a\); it has \['z'\]"):
        taken(struct(s=struct("z")), ["s"], one)
    with pytest.raises(SchemaError, match=r"'s' is a struct; the model was trained on a number \('x'\)"):
        taken(struct(s=struct("z")), ["s"], trained_on(struct("x"), ["x"]))


def test_fields_that_differ_only_in_case_are_never_confused():
    both = trained_on(struct(s=struct("a")), ["s"])
    both = [both[0], type(both[0])("s.A", "float64", (), "feature", "scalar", source=("s", "A"))]
    with pytest.raises(SchemaError, match="no field 'A'"):
        taken(struct(s=struct("a", "b")), ["s"], both)
    with pytest.raises(SchemaError, match=r"has the fields 's\.a', 's.A'\. sparkhvd ignores case"):
        taken(struct(s=struct("a", "A")), ["s"], both)


def test_another_number_or_kind_of_columns_is_refused():
    with pytest.raises(ParamError, match=r"names 1 column \['s'\], but the model was trained on 2: \['s', 'x'\]"):
        taken(struct(s=struct("b", "a", deep=struct("q", "p"))), ["s"])
    vector = trained_on(t.StructType([t.StructField("v", VectorUDT())]), ["v"])
    with pytest.raises(SchemaError, match=r"'x' is a number; the model was trained on a vector \('v'\)"):
        taken(struct("x"), ["x"], vector)


def test_one_field_of_a_struct_is_found_in_it():
    one = trained_on(struct("s.b"), ["s.b"])
    assert taken(struct(s=struct("a", "b")), ["s.b"], one) == ["s.b"]
    assert match_features(struct(s=struct("a", "b")), ["s.b"], one)[0].path == ("s", "b")


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (["s", "x"], ["s.b", "s.a", "s.deep.q", "s.deep.p", "x"]),
        (["t", "y"], ["t.b", "t.a", "t.deep.q", "t.deep.p", "y"]),
        (["b", "a", "q", "p", "x"], ["b", "a", "q", "p", "x"]),
    ],
)
def test_pandas_tables_name_fields_after_their_column(chosen, names):
    assert pandas_column_names(chosen, TRAINED) == names
