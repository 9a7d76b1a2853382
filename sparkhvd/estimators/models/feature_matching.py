"""Which columns of a DataFrame feed the columns that a model was trained on.

Columns go by their order in ``feature_cols``, so that ``setFeatureCols`` may rename them; the fields of a struct go by
their names, whatever their order in either struct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.data.schema.selection import columns_by_name
from sparkhvd.errors import ParamError, SchemaError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def with_sources(schema: DataSchema, feature_cols: Sequence[str]) -> DataSchema:
    """The schema in which every feature says which of ``feature_cols`` it is a field of.

    Args:
        schema: of a training; prepared rows have the fields of structs as columns of their own.
        feature_cols: what the user selected.
    """
    waiting, known = schema.of("feature"), []
    for name in feature_cols:
        count = _fields_at_front(waiting, name, feature_cols)
        known += [replace(column, source=_source(column.name, name)) for column in waiting[:count]]
        waiting = waiting[count:]
    return schema.replaced(known)


def match_features(
    spark_schema: StructType, feature_cols: Sequence[str], trained: Sequence[ColumnSpec]
) -> list[ColumnSpec]:
    """The columns of a DataFrame in the order of the model's, each with the shape, fill and form of its training.

    Args:
        spark_schema: ``df.schema``.
        feature_cols: the columns to take.
        trained: what the model was trained on, see ``with_sources``.

    Raises:
        ParamError: there are more or fewer columns than in the training.
        SchemaError: a column or a field is missing, or has another type than the model takes.
    """
    given = columns_by_name(spark_schema, feature_cols, "feature")
    groups = _by_column(trained)
    is_flat = all(found[0].name == name for name, found in zip(feature_cols, given, strict=True))
    if is_flat and len(given) == len(trained):  # fields of structs may have become columns of their own
        columns = [column for (column,) in given]
    elif len(given) == len(groups):
        columns = [
            column
            for name, found, known in zip(feature_cols, given, groups, strict=True)
            for column in _by_field(name, found, known)
        ]
    else:
        raise ParamError(
            f"feature_columns names {len(given)} columns {list(feature_cols)} but the model was trained on "
            f"{len(groups)}: {[column.path[0] for column, *_ in groups]}."
        )
    return [_as_trained(column, known) for column, known in zip(columns, trained, strict=True)]


def pandas_column_names(feature_cols: Sequence[str], trained: Sequence[ColumnSpec]) -> list[str]:
    """By what name a table without Spark has each feature: its column, or ``column.field``.

    Args:
        feature_cols: the columns to take.
        trained: what the model was trained on, see ``with_sources``.
    """
    groups = _by_column(trained)
    if len(feature_cols) == len(trained) != len(groups):
        return list(feature_cols)
    tops = feature_cols if len(feature_cols) == len(groups) else [columns[0].path[0] for columns in groups]
    return [
        ".".join((top, *column.source[1:])) for top, columns in zip(tops, groups, strict=True) for column in columns
    ]


def _fields_at_front(columns: Sequence[ColumnSpec], name: str, selected: Sequence[str]) -> int:
    """How many of the first columns are the column of this name, or its fields; a selected column is no field."""
    if columns and columns[0].name == name:
        return 1
    others = (
        place
        for place, column in enumerate(columns)
        if column.name in selected or not column.name.startswith(f"{name}.")
    )
    return next(others, len(columns))


def _source(name: str, column: str) -> tuple[str, ...]:
    return () if name == column else (column, name.removeprefix(f"{column}."))


def _by_column(trained: Sequence[ColumnSpec]) -> list[list[ColumnSpec]]:
    """The fields of each column; a column that is no struct is alone."""
    groups: list[list[ColumnSpec]] = []
    for column in trained:
        if groups and column.source and groups[-1][0].source[:1] == column.source[:1]:
            groups[-1].append(column)
        else:
            groups.append([column])
    return groups


def _by_field(name: str, given: Sequence[ColumnSpec], trained: Sequence[ColumnSpec]) -> list[ColumnSpec]:
    """The given fields of a struct in the order of those that the model was trained on."""
    is_struct, was_struct = given[0].name != name, bool(trained[0].source)
    if not was_struct and is_struct:
        raise SchemaError(
            f"Feature column {name!r} is a struct; the model was trained on {_article(trained[0])} "
            f"({trained[0].name!r}). Select one of its fields: {[column.name for column in given]}."
        )
    if not was_struct:
        return list(given)
    if not is_struct:
        raise SchemaError(
            f"Feature column {name!r} is {_article(given[0])}; the model was trained on a struct "
            f"({trained[0].path[0]!r}) with the fields {[_field(column) for column in trained]}."
        )
    fields = {column.name.removeprefix(f"{name}."): column for column in given}
    wanted = [_field(column) for column in trained]
    exact = {field: fields[field] for field in wanted if field in fields}
    others = {field.lower(): column for field, column in fields.items() if field not in exact}  # Spark ignores case
    found = [exact.get(field) or others.pop(field.lower(), None) for field in wanted]
    if None in found:
        field = wanted[found.index(None)]
        raise SchemaError(
            f"Feature column {name!r} has no field {field!r}, which the model was trained on "
            f"({trained[0].path[0]}.{field}); it has {list(fields)}. Fields of structs go by their names: rename them."
        )
    return [column for column in found if column is not None]


def _field(column: ColumnSpec) -> str:
    return ".".join(column.source[1:])


def _as_trained(column: ColumnSpec, known: ColumnSpec) -> ColumnSpec:
    if (column.kind == "scalar") != (known.kind == "scalar"):
        raise SchemaError(
            f"Feature column {column.name!r} is {_article(column)}; the model was trained on {_article(known)} "
            f"({known.name!r})."
        )
    if known.dtype == "str" != column.dtype:
        raise SchemaError(
            f"Feature column {column.name!r} is no text; the model was trained on texts ({known.name!r}). Cast it: "
            'df.withColumn(..., column.cast("string")).'
        )
    if known.is_number and not column.is_number:
        raise SchemaError(
            f"Feature column {column.name!r} holds {_values(column)}; the model takes numbers. What a "
            "transformation_fn made of them in the training has to be in the DataFrame here: transform() does not call "
            "transformation_fn."
        )
    return replace(column, shape=known.shape, fill=known.fill, sparse=known.sparse)


def _article(column: ColumnSpec) -> str:
    scalar = "a text" if column.dtype == "str" else "a number"
    return {"scalar": scalar, "array": "an array", "vector": "a vector"}[column.kind]


def _values(column: ColumnSpec) -> str:
    others = {"str": "texts", "bytes": "bytes", "decimal": "decimals that no number type holds exactly"}
    return others.get(column.dtype, "dates or times")
