"""Which columns of a DataFrame are trained on, decided from its schema alone: no Spark job runs here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparkhvd.data.schema import ColumnSpec, DataSchema, Fill, Role
from sparkhvd.data.spark_types import checked_fill, leaves, numbers_only
from sparkhvd.errors import SchemaError
from sparkhvd.nearest import did_you_mean

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructType

RESERVED_PREFIX = "sparkhvd_"

_SWITCHES = frozenset({"boolean", "tinyint", "smallint", "int", "bigint", "float", "double"})


@dataclass(frozen=True)
class Selection:
    """What of a DataFrame is trained on.

    Attributes:
        schema: features, then labels, then the weight. Shapes of arrays and vectors are not known yet (None).
        validation: the fraction of the rows to hold out (above 0), the column that says which, or None.
    """

    schema: DataSchema
    validation: float | str | None = None


def select(
    spark_schema: StructType,
    *,
    feature_cols: Sequence[str] | None,
    label_cols: Sequence[str],
    weight_col: str | None = None,
    validation: float | str | None = None,
    sparse_cols: Sequence[str] = (),
    fill: Mapping[str, Fill] | None = None,
    transformed: bool = False,
) -> Selection:
    """Check the columns of a DataFrame against what the user asked for.

    Args:
        spark_schema: ``df.schema``.
        feature_cols: None means every column but the labels, the weight and the validation column.
        label_cols: may be empty where there is nothing to learn (transform).
        weight_col: the rows' weights: one number per row.
        validation: a fraction in [0, 1), where 0 means none, or the name of a boolean or 0/1 column.
        sparse_cols: the vector columns to deliver by their stored entries.
        fill: by column (``struct.field`` for a field), what to put where it is NULL: the row, an array in it, or an
            element.
        transformed: a transformation function gets the columns first, so they may also be texts, dates and the like.

    Raises:
        SchemaError: a column is missing, appears twice, or has a type that cannot be used, the fraction is out of
            range, or a fill is not of the column's type. Raised before any Spark job.
    """
    labels = _names("label_cols", label_cols)
    others = [*labels, *([weight_col] if weight_col is not None else [])]
    held_out = _validation(spark_schema, validation)
    if feature_cols is None:
        left_out = {*others, held_out}
        features = [field.name for field in spark_schema.fields if field.name not in left_out]
    else:
        features = _names("feature_cols", feature_cols)
    if not features:
        raise SchemaError(f"No feature column is selected; feature_cols is empty. {_there_are(spark_schema)}")
    _refuse_duplicates([*features, *others, *([held_out] if isinstance(held_out, str) else [])])
    columns = [
        *(column for name in features for column in _columns(spark_schema, name, "feature")),
        *(column for name in labels for column in _columns(spark_schema, name, "label")),
        *(column for name in others[len(labels) :] for column in _columns(spark_schema, name, "weight")),
    ]
    schema = completed(DataSchema(tuple(columns)), sparse_cols, fill or {}, transformed=transformed)
    return Selection(schema, held_out)


def completed(
    schema: DataSchema, sparse_cols: Sequence[str], fill: Mapping[str, Fill], *, transformed: bool
) -> DataSchema:
    """The columns with what the user asked for each of them.

    Raises:
        SchemaError: a column comes twice, cannot be used, or cannot be sparse or filled as asked.
    """
    _refuse_duplicates(schema.names())
    for column in schema.columns:
        if column.role == "weight" and (column.kind != "scalar" or not column.is_number or column.dtype == "bool"):
            raise SchemaError(f"Column {column.name!r} is no number; a weight is one number per row.")
        if not transformed:
            numbers_only(column)
    return DataSchema(tuple(_filled(_with_sparse(list(schema.columns), sparse_cols), fill)))


def no_such_column(name: str, use: str, names: Sequence[str], there_are: str) -> SchemaError:
    """The error for a column that is not there, with those that are."""
    hint = f" {did_you_mean(name, names, most=3)}".rstrip()
    shown = ", ".join(repr(other) for other in names[:30])
    more = f" and {len(names) - 30} more" if len(names) > 30 else ""
    return SchemaError(f"There is no column {name!r} (asked for as {use}).{hint} {there_are} {shown}{more}.")


def schema_of(
    spark_schema: StructType,
    feature_cols: Sequence[str] | None,
    label_cols: Sequence[str],
    weight_col: str | None = None,
    validation: float | str | None = None,
    *,
    transformed: bool = False,
) -> DataSchema:
    """The schema of ``select`` with the same arguments."""
    return select(
        spark_schema,
        feature_cols=feature_cols,
        label_cols=label_cols,
        weight_col=weight_col,
        validation=validation,
        transformed=transformed,
    ).schema


def expressions(columns: Iterable[ColumnSpec], *, compress: bool = False) -> list[Column | str]:
    """What selects these columns in Spark, each under its own name.

    Fields of structs become columns of their own, vectors the struct that Spark keeps them in; nothing else changes. A
    name costs Spark a fraction of what an expression does.

    Args:
        columns: from ``select``.
        compress: give dense vectors the sparse form too.
    """
    return [
        quoted(column.name)
        if column.path == (column.name,) and column.kind != "vector"
        else _expression(column, compress).alias(column.name)
        for column in columns
    ]


def _expression(column: ColumnSpec, compress: bool) -> Column:
    from pyspark.sql import functions  # noqa: PLC0415  (this module is also read where Spark is not)

    first, *fields = column.path
    value = source(first)
    for field in fields:
        value = value.getField(field)
    if column.kind != "vector":
        return value
    vector = functions.unwrap_udt(value)
    return functions.when(vector["type"] == 1, _sparse_form(vector)).otherwise(vector) if compress else vector


def _sparse_form(vector: Column) -> Column:
    """A dense vector as Spark keeps sparse ones: a struct of type 0, size, places and values."""
    from pyspark.sql import functions  # noqa: PLC0415

    values = vector["values"]
    numbered = functions.transform(values, lambda value, place: functions.struct(place.alias("i"), value.alias("v")))
    entries = functions.filter(numbered, lambda entry: entry["v"] != 0)
    return functions.struct(
        functions.lit(0).cast("tinyint").alias("type"),
        functions.array_size(values).alias("size"),
        entries["i"].alias("indices"),
        entries["v"].alias("values"),
    )


def quoted(name: str) -> str:
    """How Spark is told the column of exactly this name; a dot in it does not mean a field."""
    return "`" + name.replace("`", "``") + "`"


def source(name: str) -> Column:
    """The column of exactly this name."""
    from pyspark.sql import functions  # noqa: PLC0415

    return functions.col(quoted(name))


def _names(parameter: str, names: Sequence[str]) -> list[str]:
    if isinstance(names, str):
        raise SchemaError(f"{parameter} is the string {names!r}; give a list of column names: [{names!r}].")
    return list(names)


def _refuse_duplicates(names: list[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise SchemaError(
            f"Column {repeated[0]!r} is selected more than once among features, labels, weight and validation. "
            "Name it once; a column with two uses needs a copy under another name (df.withColumn)."
        )


def _there_are(spark_schema: StructType) -> str:
    names = spark_schema.names
    shown = ", ".join(repr(name) for name in names[:30])
    more = f" and {len(names) - 30} more" if len(names) > 30 else ""
    return f"The DataFrame has {shown}{more}." if names else "The DataFrame has no column."


def _type_of(spark_schema: StructType, name: str, use: str) -> DataType:
    if not isinstance(name, str):
        raise SchemaError(f"The {use} column {name!r} is not a string; columns are given by their names.")
    same = [other for other in spark_schema.names if other.lower() == name.lower()]
    if name not in same:
        raise no_such_column(name, use, spark_schema.names, "The DataFrame has")
    if len(same) > 1:
        raise SchemaError(
            f"Column {name!r} (asked for as {use}) is ambiguous: the DataFrame has {', '.join(map(repr, same))}, and "
            "Spark does not tell upper from lower case. Rename or drop all but one."
        )
    if name.lower().startswith(RESERVED_PREFIX):
        raise SchemaError(f"Column {name!r} cannot be used: names that start with {RESERVED_PREFIX!r} are reserved.")
    return spark_schema[name].dataType


def _columns(spark_schema: StructType, name: str, role: Role) -> list[ColumnSpec]:
    spark_type = _type_of(spark_schema, name, role)
    columns = [
        ColumnSpec(
            ".".join(leaf.path),
            leaf.dtype,
            () if leaf.kind == "scalar" else None,
            role,
            leaf.kind,
            source=leaf.path if len(leaf.path) > 1 else (),
            depth=leaf.depth,
        )
        for leaf in leaves(name, spark_type)
    ]
    if role == "weight" and [(c.kind, c.is_number and c.dtype != "bool") for c in columns] != [("scalar", True)]:
        text = spark_type.simpleString()
        raise SchemaError(f"Column {name!r} has the type {text}; a weight is one number per row.")
    return columns


def _with_sparse(columns: list[ColumnSpec], sparse_cols: Sequence[str]) -> list[ColumnSpec]:
    wanted = set(_names("sparse_cols", sparse_cols))
    for name in sorted(wanted):
        if name not in {column.name for column in columns if column.kind == "vector"}:
            vectors = [column.name for column in columns if column.kind == "vector"]
            raise SchemaError(f"sparse_cols names {name!r}, which is no selected vector column; those are {vectors}.")
    return [replace(column, sparse=column.name in wanted) for column in columns]


def _filled(columns: list[ColumnSpec], fill: Mapping[str, Fill]) -> list[ColumnSpec]:
    names = [column.name for column in columns]
    for name in fill:
        if name not in names:
            raise SchemaError(f"fill names {name!r}, which is no selected column; those are {names}.")
    for column in columns:
        if column.sparse and column.name in fill:
            raise SchemaError(
                f"Column {column.name!r} is in sparse_cols and in fill; a sparse row has nothing to fill."
            )
    return [
        replace(column, fill=checked_fill(column, fill[column.name])) if column.name in fill else column
        for column in columns
    ]


def _validation(spark_schema: StructType, validation: object) -> float | str | None:
    if validation is None:
        return None
    if isinstance(validation, str):
        text = _type_of(spark_schema, validation, "validation").simpleString()
        if text not in _SWITCHES and not text.startswith("decimal"):
            raise SchemaError(
                f"Validation column {validation!r} has the type {text}; it must be boolean, or a number that is 1 for "
                "the rows to hold out and 0 for the others."
            )
        return validation
    if isinstance(validation, bool) or not isinstance(validation, (int, float)):
        raise SchemaError(f"validation is {validation!r}; give a fraction in [0, 1), the name of a column, or None.")
    if math.isnan(validation) or not 0 <= validation < 1:
        raise SchemaError(
            f"The validation fraction {validation!r} is not in [0, 1); 0.1 holds out a tenth of the rows."
        )
    return float(validation) or None
