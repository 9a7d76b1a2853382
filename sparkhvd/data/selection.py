"""Which columns of a DataFrame are trained on, decided from its schema alone: no Spark job runs here."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sparkhvd.data.schema import ColumnSpec, DataSchema, Role
from sparkhvd.errors import SchemaError

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructType

RESERVED_PREFIX = "sparkhvd_"

_DTYPE_OF = {
    "boolean": "bool",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
}
_WHAT_TO_DO = {
    "string": "index or encode it first, for example with pyspark.ml.feature.StringIndexer",
    "binary": "decode it to an array of numbers first",
    "date": "turn it into a number first, for example with pyspark.sql.functions.unix_date",
    "timestamp": "turn it into a number first, for example with pyspark.sql.functions.unix_micros",
    "decimal": "cast it to double or to an integer type; which one loses nothing is for you to say",
    "struct": "select its fields as columns of their own",
    "map": "select its values as columns of their own",
    "array": "only arrays of numbers or booleans are supported; flatten nested ones",
}


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
) -> Selection:
    """Check the columns of a DataFrame against what the user asked for.

    Args:
        spark_schema: ``df.schema``.
        feature_cols: None means every column but the labels, the weight and the validation column.
        label_cols: may be empty where there is nothing to learn (transform).
        weight_col: the rows' weights: one number per row.
        validation: a fraction in [0, 1), where 0 means none, or the name of a boolean or 0/1 column.

    Raises:
        SchemaError: a column is missing, appears twice, or has a type that cannot be used, or the fraction is out of
            range. Raised before any Spark job.
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
        *(_column(spark_schema, name, "feature") for name in features),
        *(_column(spark_schema, name, "label") for name in labels),
        *(_column(spark_schema, name, "weight") for name in others[len(labels) :]),
    ]
    return Selection(DataSchema(tuple(columns)), held_out)


def schema_of(
    spark_schema: StructType,
    feature_cols: Sequence[str] | None,
    label_cols: Sequence[str],
    weight_col: str | None = None,
    validation: float | str | None = None,
) -> DataSchema:
    """The schema of ``select`` with the same arguments."""
    return select(
        spark_schema,
        feature_cols=feature_cols,
        label_cols=label_cols,
        weight_col=weight_col,
        validation=validation,
    ).schema


def expressions(columns: Iterable[ColumnSpec]) -> list[Column]:
    """The Spark expressions that select these columns, each under its own name.

    Vectors, dense or sparse, become arrays of doubles; everything else keeps its type.
    """
    return [_expression(column).alias(column.name) for column in columns]


def _expression(column: ColumnSpec) -> Column:
    from pyspark.ml.functions import vector_to_array  # noqa: PLC0415  (this module is also read where Spark is not)
    from pyspark.sql import functions  # noqa: PLC0415

    value = source(column.name)
    if column.kind != "vector":
        return value
    return functions.when(value.isNotNull(), vector_to_array(value))  # which fails on NULL without naming the column


def source(name: str) -> Column:
    """The column of exactly this name; a dot in it does not mean a field."""
    from pyspark.sql import functions  # noqa: PLC0415

    return functions.col("`" + name.replace("`", "``") + "`")


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
        close = same or difflib.get_close_matches(name, spark_schema.names, n=3, cutoff=0.6)
        hint = f" Did you mean {' or '.join(repr(other) for other in close)}?" if close else ""
        raise SchemaError(f"There is no column {name!r} (asked for as {use}).{hint} {_there_are(spark_schema)}")
    if len(same) > 1:
        raise SchemaError(
            f"Column {name!r} (asked for as {use}) is ambiguous: the DataFrame has {', '.join(map(repr, same))}, and "
            "Spark does not tell upper from lower case. Rename or drop all but one."
        )
    if name.lower().startswith(RESERVED_PREFIX):
        raise SchemaError(f"Column {name!r} cannot be used: names that start with {RESERVED_PREFIX!r} are reserved.")
    return spark_schema[name].dataType


def _column(spark_schema: StructType, name: str, role: Role) -> ColumnSpec:
    spark_type = _type_of(spark_schema, name, role)
    text = spark_type.simpleString()
    kind: Literal["scalar", "array", "vector"] = "scalar"
    element = text
    if text == "vector":
        kind, element = "vector", "double"
    elif text.startswith("array<"):
        kind, element = "array", text[len("array<") : -1]
    if element not in _DTYPE_OF:
        reason = _WHAT_TO_DO.get(spark_type.typeName(), "it is not numeric")
        raise SchemaError(
            f"Column {name!r} has the type {text}, which cannot be a {role}: {reason}. Supported are boolean, byte, "
            "short, int, long, float and double, arrays of them, and ML vectors."
        )
    if role == "weight" and (kind != "scalar" or element == "boolean"):
        raise SchemaError(f"Column {name!r} has the type {text}; a weight is one number per row.")
    return ColumnSpec(name, _DTYPE_OF[element], () if kind == "scalar" else None, role, kind)


def _validation(spark_schema: StructType, validation: object) -> float | str | None:
    if validation is None:
        return None
    if isinstance(validation, str):
        text = _type_of(spark_schema, validation, "validation").simpleString()
        if text not in _DTYPE_OF and not text.startswith("decimal"):
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
