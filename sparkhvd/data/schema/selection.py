"""Selects the columns of a DataFrame to train on, from its schema alone: no Spark job runs here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING

from sparkhvd._util.suggestions import did_you_mean
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema, Fill, Role
from sparkhvd.data.schema.spark_types import checked_fill, leaves, numbers_only
from sparkhvd.errors import SchemaError

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructType

RESERVED_PREFIX = "sparkhvd_"

_VALIDATION_TYPES = frozenset({"boolean", "tinyint", "smallint", "int", "bigint", "float", "double"})


@dataclass(frozen=True)
class Selection:
    """The columns of a DataFrame to train on, and its rows to hold out.

    Attributes:
        schema: features, then labels, then the weight. The shapes of arrays and vectors are still unknown (None).
        validation: the fraction of the rows to hold out (above 0), the column that marks them, or None.
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
    case_sensitive: bool = False,
) -> Selection:
    """Check the columns of a DataFrame against the user's request.

    Args:
        spark_schema: ``df.schema``.
        feature_cols: columns, or ``struct.field``; None means every column except the labels, the weight and the
            validation column.
        label_cols: may be empty for inference (transform).
        weight_col: the rows' weights: one number per row.
        validation: a fraction in [0, 1), where 0 means none, or the name of a boolean or 0/1 column.
        sparse_cols: the vector columns to deliver as their stored entries.
        fill: by column (``struct.field`` for a field), the value to put in place of NULL: of a whole row, of an inner
            array, or of an element.
        transformed: whether a transformation function converts the columns first, so that they may also be strings,
            dates and the like.
        case_sensitive: whether names are case-sensitive (``spark.sql.caseSensitive``). If they are not, a column gets
            the name in the user's spelling.

    Raises:
        SchemaError: a column is missing, appears twice, or has a type that cannot be used, the fraction is out of
            range, or a fill is not of the column's type. Raised before any Spark job.
    """
    table = _Table(spark_schema, case_sensitive=case_sensitive)
    labels = _names("label_cols", label_cols)
    others = [*labels, *([weight_col] if weight_col is not None else [])]
    held_out = _validation(table, validation)
    if feature_cols is None:
        left_out = {table.key(name) for name in (*others, held_out) if isinstance(name, str)}
        features = [field.name for field in spark_schema.fields if table.key(field.name) not in left_out]
    else:
        features = _names("feature_cols", feature_cols)
    if not features:
        raise SchemaError(f"No feature column is selected; feature_cols is empty. {table.contents()}")
    _refuse_duplicates([*features, *others, *([held_out] if isinstance(held_out, str) else [])], table.key)
    columns = [
        *(column for name in features for column in table.columns(name, "feature")),
        *(column for name in labels for column in table.columns(name, "label")),
        *(column for name in others[len(labels) :] for column in table.columns(name, "weight")),
    ]
    schema = completed(DataSchema(tuple(columns)), sparse_cols, fill or {}, transformed=transformed)
    return Selection(schema, held_out)


def completed(
    schema: DataSchema, sparse_cols: Sequence[str], fill: Mapping[str, Fill], *, transformed: bool
) -> DataSchema:
    """Return the schema with the user's options for each column.

    Raises:
        SchemaError: a column appears twice, cannot be used, or cannot be sparse or filled as requested.
    """
    check_roles(schema)
    for column in () if transformed else schema.columns:
        numbers_only(column)
    return DataSchema(tuple(_filled(_with_sparse(list(schema.columns), sparse_cols), fill)))


def check_roles(schema: DataSchema) -> None:
    """Refuse a column with two uses, and a weight that is not one number per row.

    Raises:
        SchemaError: see above.
    """
    _refuse_duplicates(schema.names())
    for column in schema.of("weight"):
        if column.kind != "scalar" or not column.is_number or column.dtype == "bool":
            raise SchemaError(f"Column {column.name!r} is not a number; a weight is one number per row.")


def no_such_column(name: str, use: str, names: Sequence[str], introduction: str) -> SchemaError:
    """Return the error for a missing column, which lists the existing ones after ``introduction``."""
    plain = _unquoted(name)
    hint = f" {did_you_mean(name, names, most=3)}".rstrip()
    if plain != name:
        hint = f" Write {plain!r}, without backticks, even if a name contains a dot."
    return SchemaError(f"There is no column {name!r} (requested as {use}).{hint} {introduction} {_listed(names)}.")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:30]))
    return f"{shown} and {len(names) - 30} more" if len(names) > 30 else shown


def columns_by_name(
    spark_schema: StructType, names: Sequence[str], role: Role, *, case_sensitive: bool = False
) -> list[list[ColumnSpec]]:
    """Return, for each name, the column itself, or one column per field of a struct; see ``select``.

    Raises:
        SchemaError: see ``select``.
    """
    table = _Table(spark_schema, case_sensitive=case_sensitive)
    return [table.columns(name, role) for name in names]


def with_fields(spark_schema: StructType, names: Sequence[str], *, case_sensitive: bool = False) -> tuple[str, ...]:
    """Return the names, with every struct replaced by its fields (``struct.field``); unknown names stay.

    Raises:
        SchemaError: a field cannot be used.
    """
    fields = _Fields(spark_schema, _key(case_sensitive=case_sensitive))
    selected: list[str] = []
    for name in names:
        path_and_type = fields.find(name)
        is_struct = path_and_type is not None and path_and_type[1].typeName() == "struct"
        selected += (
            [_as_requested(".".join(leaf.path), name) for leaf in leaves(*path_and_type)]
            if path_and_type and is_struct
            else [name]
        )
    return tuple(selected)


def schema_of(
    spark_schema: StructType,
    feature_cols: Sequence[str] | None,
    label_cols: Sequence[str],
    weight_col: str | None = None,
    validation: float | str | None = None,
    *,
    transformed: bool = False,
) -> DataSchema:
    """Return the schema of ``select`` with the same arguments."""
    return select(
        spark_schema,
        feature_cols=feature_cols,
        label_cols=label_cols,
        weight_col=weight_col,
        validation=validation,
        transformed=transformed,
    ).schema


def expressions(columns: Iterable[ColumnSpec], *, compress: bool = False) -> list[Column | str]:
    """Return the Spark expressions that select these columns, each under its own name.

    Fields of structs become columns of their own, and vectors become the structs in which Spark stores them. Nothing
    else changes. A plain column is returned as its name, because Spark analyzes names much faster.

    Args:
        columns: from ``select``.
        compress: convert dense vectors to the sparse form.
    """
    return [
        quoted(column.name)
        if column.path == (column.name,) and column.kind != "vector"
        else _expression(column, compress).alias(column.name)
        for column in columns
    ]


def _expression(column: ColumnSpec, compress: bool) -> Column:
    from pyspark.sql import functions  # noqa: PLC0415  (this module is also imported without Spark)

    value = value_of(column)
    if column.kind != "vector":
        return value
    vector = functions.unwrap_udt(value)
    return functions.when(vector["type"] == 1, _sparse_form(vector)).otherwise(vector) if compress else vector


def value_of(column: ColumnSpec) -> Column:
    """Return the column of the user's DataFrame, or the field of a struct, from which a column is read."""
    first, *fields = column.path
    value = source(first)
    for field in fields:
        value = value.getField(field)
    return value


def _sparse_form(vector: Column) -> Column:
    """Return a dense vector in Spark's sparse form: a struct of type 0, size, indices and values."""
    from pyspark.sql import functions  # noqa: PLC0415

    values = vector["values"]
    numbered = functions.transform(values, lambda value, index: functions.struct(index.alias("i"), value.alias("v")))
    entries = functions.filter(numbered, lambda entry: entry["v"] != 0)
    return functions.struct(
        functions.lit(0).cast("tinyint").alias("type"),
        functions.array_size(values).alias("size"),
        entries["i"].alias("indices"),
        entries["v"].alias("values"),
    )


def quoted(name: str) -> str:
    """Quote a column name for Spark, so that a dot in it does not mean a field."""
    return "`" + name.replace("`", "``") + "`"


def _unquoted(name: str) -> str:
    """Return a column or ``struct.field`` without the backticks that Spark allows around each of its names."""
    return re.sub("`((?:[^`]|``)+)`", lambda quotes: quotes[1].replace("``", "`"), name)


def source(name: str) -> Column:
    """Return the column of exactly this name."""
    from pyspark.sql import functions  # noqa: PLC0415

    return functions.col(quoted(name))


def _names(parameter: str, names: Sequence[str]) -> list[str]:
    if isinstance(names, str):
        raise SchemaError(f"{parameter} is the string {names!r}; pass a list of column names: [{names!r}].")
    return list(names)


def _refuse_duplicates(names: list[str], key: Callable[[str], str] = str) -> None:
    keys = [key(name) if isinstance(name, str) else name for name in names]  # find() refuses other types
    counts = Counter(keys)
    repeated = sorted(name for name, own in zip(names, keys, strict=True) if counts[own] > 1)
    if repeated:
        raise SchemaError(
            f"Column {repeated[0]!r} is selected more than once among features, labels, weight and validation. "
            "Name it once; a column with two uses needs a copy under another name (df.withColumn)."
        )


def _key(*, case_sensitive: bool) -> Callable[[str], str]:
    """Return a function that maps names to equal keys if Spark does not distinguish them."""
    return str if case_sensitive else str.lower


def _as_requested(actual: str, requested: str) -> str:
    """Return the name of a column, or of a field of it, in the user's spelling."""
    return requested + actual[len(requested) :]


class _Fields:
    """The columns of a DataFrame, or the fields of a struct, by name.

    Args:
        struct: the columns or fields.
        key: maps names that Spark does not distinguish to equal keys; an exact match takes precedence.
    """

    def __init__(self, struct: StructType, key: Callable[[str], str]) -> None:
        self.types = {field.name: field.dataType for field in struct.fields}
        self._key = key
        counts = Counter(map(key, self.types))
        self._names = {key(name): name for name in self.types if counts[key(name)] == 1}

    def name_of(self, name: str) -> str | None:
        """Return the actual name; None if there is none, or if several differ only in case."""
        return name if name in self.types else self._names.get(self._key(name))

    def find(self, name: str) -> tuple[tuple[str, ...], DataType] | None:
        """Return the path and the type of a field, or of ``struct.field``; both names may contain dots."""
        own = self.name_of(name)
        if own is not None:
            return (own,), self.types[own]
        for dot in (dot for dot, letter in enumerate(name) if letter == "."):
            top = self.name_of(name[:dot])
            if top is not None and self.types[top].typeName() == "struct":
                inside = _Fields(self.types[top], self._key).find(name[dot + 1 :])  # type: ignore[arg-type]
                if inside is not None:
                    return (top, *inside[0]), inside[1]
        return None


class _Table:
    """The columns of a DataFrame by name, with look-ups in constant time."""

    def __init__(self, spark_schema: StructType, *, case_sensitive: bool) -> None:
        self.key = _key(case_sensitive=case_sensitive)
        self._names = spark_schema.names
        self._fields = _Fields(spark_schema, self.key)
        self._spellings = Counter(name.lower() for name in self._names)

    def contents(self) -> str:
        """Return the names, for an error message."""
        return f"The DataFrame has {_listed(self._names)}." if self._names else "The DataFrame has no column."

    def find(self, name: str, use: str) -> tuple[tuple[str, ...], DataType]:
        """Return the path and the type of a column, or of a field as ``struct.field``."""
        if not isinstance(name, str):
            raise SchemaError(f"The {use} column {name!r} is not a string; pass the name of the column.")
        path_and_type = self._fields.find(name)
        top = name if path_and_type is None else path_and_type[0][0]
        if self._spellings[top.lower()] > 1:
            same = ", ".join(repr(other) for other in self._names if other.lower() == top.lower())
            raise SchemaError(
                f"Column {top!r} (requested as {use}) is ambiguous: the DataFrame has {same}. sparkhvd ignores case in "
                "names, as Spark does by default. Rename or drop all but one."
            )
        if path_and_type is None:
            raise no_such_column(name, use, self._names, "The DataFrame has")
        if top.lower().startswith(RESERVED_PREFIX):
            raise SchemaError(f"Column {top!r} cannot be used: names that start with {RESERVED_PREFIX!r} are reserved.")
        return path_and_type

    def columns(self, name: str, role: Role) -> list[ColumnSpec]:
        """Return the column itself, or one column per field of a struct."""
        path, spark_type = self.find(name, role)
        columns = [leaf.column(role) for leaf in leaves(path, spark_type)]
        _refuse_spellings(name, [column.name for column in columns])
        if ".".join(path) != name:
            columns = [replace(one, name=_as_requested(one.name, name), source=one.path) for one in columns]
        if role == "weight" and [(c.kind, c.is_number and c.dtype != "bool") for c in columns] != [("scalar", True)]:
            text = spark_type.simpleString()
            raise SchemaError(f"Column {name!r} has the type {text}; a weight is one number per row.")
        return columns


def _refuse_spellings(name: str, fields: Sequence[str]) -> None:
    counts = Counter(field.lower() for field in fields)
    same = [field for field in fields if counts[field.lower()] > 1]
    if same:
        raise SchemaError(
            f"Column {name!r} has the fields {', '.join(map(repr, same))}. sparkhvd ignores case in names, as Spark "
            "does by default. Rename or drop all but one."
        )


def _with_sparse(columns: list[ColumnSpec], sparse_cols: Sequence[str]) -> list[ColumnSpec]:
    wanted = set(_names("sparse_cols", sparse_cols))
    vectors = {column.name: column for column in columns if column.kind == "vector"}
    for name in sorted(wanted):
        if name not in vectors:
            raise SchemaError(
                f"sparse_cols names {name!r}, which is not a selected vector column; expected one of {[*vectors]}."
            )
    return [replace(column, sparse=column.name in wanted) for column in columns]


def _filled(columns: list[ColumnSpec], fill: Mapping[str, Fill]) -> list[ColumnSpec]:
    names = [column.name for column in columns]
    for name in fill:
        if name not in names:
            raise SchemaError(f"fill names {name!r}, which is not a selected column; expected one of {names}.")
    for column in columns:
        if column.sparse and column.name in fill:
            raise SchemaError(
                f"Column {column.name!r} is in both sparse_cols and fill, but a sparse column cannot be filled. "
                "Remove it from one of them."
            )
    return [
        replace(column, fill=checked_fill(column, fill[column.name])) if column.name in fill else column
        for column in columns
    ]


def _validation(table: _Table, validation: object) -> float | str | None:
    if validation is None:
        return None
    if isinstance(validation, str):
        path, spark_type = table.find(validation, "validation")
        if len(path) > 1:
            raise SchemaError(
                f"Validation column {validation!r} is a field of a struct. Select it as a column of its own "
                "(df.withColumn)."
            )
        text = spark_type.simpleString()
        if text not in _VALIDATION_TYPES and not text.startswith("decimal"):
            raise SchemaError(
                f"Validation column {validation!r} has the type {text}; it must be boolean, or a number that is 1 for "
                "held-out rows and 0 for the others."
            )
        return validation
    if isinstance(validation, bool) or not isinstance(validation, Real):
        raise SchemaError(f"validation is {validation!r}; it must be a fraction in [0, 1), a column name or None.")
    if not 0 <= float(validation) < 1:
        raise SchemaError(
            f"The validation fraction {validation!r} is not in [0, 1); 0.1 holds out a tenth of the rows."
        )
    return float(validation) or None
