"""Match the columns of a DataFrame to the columns that a model was trained on.

Columns are matched by their position in ``feature_cols``, so that ``setFeatureCols`` may rename them. Struct fields are
matched by name, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sparkhvd._util.counts import counted
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.data.schema.selection import columns_by_name
from sparkhvd.errors import ParamError, SchemaError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def with_sources(schema: DataSchema, feature_cols: Sequence[str]) -> DataSchema:
    """Return the schema with a ``source`` in every feature that is a field of one of ``feature_cols``.

    Args:
        schema: the schema of the training rows, in which struct fields are separate columns.
        feature_cols: the columns that the user selected.
    """
    remaining, features = schema.of("feature"), []
    for name in feature_cols:
        count = _count_leading_fields(remaining, name, feature_cols)
        features += [replace(column, source=_source(column.name, name)) for column in remaining[:count]]
        remaining = remaining[count:]
    return schema.replaced(features)


def match_features(
    spark_schema: StructType,
    feature_cols: Sequence[str],
    trained: Sequence[ColumnSpec],
    *,
    case_sensitive: bool = False,
) -> list[ColumnSpec]:
    """Return the columns of a DataFrame in the model's order, each with its shape, fill and sparsity in training.

    Args:
        spark_schema: ``df.schema``.
        feature_cols: the columns to use.
        trained: the columns that the model was trained on, see ``with_sources``.
        case_sensitive: whether upper and lower case count in the names of columns (``spark.sql.caseSensitive``).

    Raises:
        ParamError: the number of columns differs from the training.
        SchemaError: a column or a field is missing, or its type does not fit the model.
    """
    selected = columns_by_name(spark_schema, feature_cols, "feature", case_sensitive=case_sensitive)
    groups = _group_by_column(trained)
    is_flat = all(fields[0].name == name for name, fields in zip(feature_cols, selected, strict=True))
    if is_flat and len(selected) == len(trained):  # struct fields may have become columns of their own
        columns = [column for (column,) in selected]
    elif len(selected) == len(groups):
        columns = [
            column
            for name, fields, trained_fields in zip(feature_cols, selected, groups, strict=True)
            for column in _match_fields(name, fields, trained_fields)
        ]
    else:
        raise ParamError(
            f"feature_columns names {counted(len(selected), 'column')} {list(feature_cols)}, but the model was trained "
            f"on {len(groups)}: {[column.path[0] for column, *_ in groups]}. Name one column for each of these."
        )
    return [_as_trained(column, trained_column) for column, trained_column in zip(columns, trained, strict=True)]


def pandas_column_names(feature_cols: Sequence[str], trained: Sequence[ColumnSpec]) -> list[str]:
    """Return the name of each feature in a pandas DataFrame: its column, or ``column.field``.

    Args:
        feature_cols: the columns to use.
        trained: the columns that the model was trained on, see ``with_sources``.
    """
    groups = _group_by_column(trained)
    if len(feature_cols) == len(trained) != len(groups):
        return list(feature_cols)
    column_names = feature_cols if len(feature_cols) == len(groups) else [columns[0].path[0] for columns in groups]
    return [
        ".".join((column_name, *column.source[1:]))
        for column_name, columns in zip(column_names, groups, strict=True)
        for column in columns
    ]


def _count_leading_fields(columns: Sequence[ColumnSpec], name: str, selected: Sequence[str]) -> int:
    """Return how many leading columns are the column ``name`` or its fields; a selected column is never a field."""
    if columns and columns[0].name == name:
        return 1
    others = (
        index
        for index, column in enumerate(columns)
        if column.name in selected or not column.name.startswith(f"{name}.")
    )
    return next(others, len(columns))


def _source(name: str, column: str) -> tuple[str, ...]:
    return () if name == column else (column, name.removeprefix(f"{column}."))


def _group_by_column(trained: Sequence[ColumnSpec]) -> list[list[ColumnSpec]]:
    """Group the fields of each struct; any other column is a group of one."""
    groups: list[list[ColumnSpec]] = []
    for column in trained:
        if groups and column.source and groups[-1][0].source[:1] == column.source[:1]:
            groups[-1].append(column)
        else:
            groups.append([column])
    return groups


def _match_fields(name: str, columns: Sequence[ColumnSpec], trained: Sequence[ColumnSpec]) -> list[ColumnSpec]:
    """Return the fields of a struct in the order that the model was trained on."""
    is_struct, was_struct = columns[0].name != name, bool(trained[0].source)
    if not was_struct and is_struct:
        raise SchemaError(
            f"Feature column {name!r} is a struct; the model was trained on {_kind_text(trained[0])} "
            f"({trained[0].name!r}). Select one of its fields: {[column.name for column in columns]}."
        )
    if not was_struct:
        return list(columns)
    if not is_struct:
        raise SchemaError(
            f"Feature column {name!r} is {_kind_text(columns[0])}; the model was trained on a struct "
            f"({trained[0].path[0]!r}) with the fields {[_field(column) for column in trained]}."
        )
    fields = {column.name.removeprefix(f"{name}."): column for column in columns}
    trained_fields = [_field(column) for column in trained]
    exact = {field: fields[field] for field in trained_fields if field in fields}
    # By default, Spark ignores the case of names.
    by_lower_case = {field.lower(): column for field, column in fields.items() if field not in exact}
    matches = [exact.get(field) or by_lower_case.pop(field.lower(), None) for field in trained_fields]
    if None in matches:
        field = trained_fields[matches.index(None)]
        raise SchemaError(
            f"Feature column {name!r} has no field {field!r}, which the model was trained on "
            f"({trained[0].path[0]}.{field}); it has {list(fields)}. Struct fields are matched by name: rename "
            "the field."
        )
    return [column for column in matches if column is not None]


def _field(column: ColumnSpec) -> str:
    return ".".join(column.source[1:])


def _as_trained(column: ColumnSpec, trained: ColumnSpec) -> ColumnSpec:
    if (column.kind == "scalar") != (trained.kind == "scalar"):
        raise SchemaError(
            f"Feature column {column.name!r} is {_kind_text(column)}; the model was trained on {_kind_text(trained)} "
            f"({trained.name!r})."
        )
    if trained.dtype == "str" != column.dtype:
        raise SchemaError(
            f"Feature column {column.name!r} does not hold strings, which the model was trained on "
            f'({trained.name!r}). Cast it: df.withColumn(..., column.cast("string")).'
        )
    if trained.is_number and not column.is_number:
        raise SchemaError(
            f"Feature column {column.name!r} holds {_content_text(column)}; the model takes numbers. If a "
            "transformation_fn converted them in training, convert them in the DataFrame first: transform() does not "
            "call transformation_fn."
        )
    return replace(column, shape=trained.shape, fill=trained.fill, sparse=trained.sparse)


def _kind_text(column: ColumnSpec) -> str:
    scalar = "a string" if column.dtype == "str" else "a number"
    return {"scalar": scalar, "array": "an array", "vector": "a vector"}[column.kind]


def _content_text(column: ColumnSpec) -> str:
    names = {"str": "strings", "bytes": "bytes", "decimal": "decimals that no number type holds exactly"}
    return names.get(column.dtype, "dates or times")
