"""Rows with columns of user-defined types, such as ML vectors, on their way through a Python function.

Spark 4.3 hands the columnar batches of a Parquet scan to a Python function as they are, and fails where a column of a
user-defined type is among them, used or not (UNSUPPORTED_DATATYPE). An operator between the scan and the function makes
rows of the batches. The optimizer moves projections, and filters that it knows, to other places; a filter that is true
of every row, and that it cannot simplify, stays directly above the scan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkhvd.data.schema.selection import source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType


def as_rows(df: DataFrame, columns: Sequence[str]) -> DataFrame:
    """The same rows; where a column is of a user-defined type, not in columnar batches.

    Args:
        df: the rows.
        columns: of which one may be read for it: those that the Python function takes.
    """
    if not is_user_defined(df.schema):
        return df
    nullable = {field.name for field in df.schema.fields if field.nullable}
    # Of a column that cannot be NULL, the optimizer knows that this is true.
    chosen = next((name for name in [*columns, *df.columns] if name in nullable), None)
    return df if chosen is None else df.where(source(chosen).isNull() >= False)


def is_user_defined(kind: DataType) -> bool:
    """Whether a type is a user-defined one, or has one inside."""
    from pyspark.sql.types import UserDefinedType  # noqa: PLC0415  (ranks read this package without Spark)

    if isinstance(kind, UserDefinedType):
        return True
    if kind.typeName() == "struct":
        return any(is_user_defined(field.dataType) for field in kind.fields)  # type: ignore[attr-defined]
    inside = {"array": ("elementType",), "map": ("keyType", "valueType")}.get(kind.typeName(), ())
    return any(is_user_defined(getattr(kind, part)) for part in inside)
