"""Passes rows with columns of user-defined types, such as ML vectors, to a Python function.

Spark 4.3 passes the columnar batches of a Parquet scan directly to a Python function, and fails if a column of a
user-defined type is among them, used or not (UNSUPPORTED_DATATYPE). An operator between the scan and the function
converts the batches to rows. The optimizer moves projections and ordinary filters elsewhere. A filter that is true for
every row, and that the optimizer cannot simplify, stays directly above the scan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkhvd.data.schema.selection import source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType


def as_rows(df: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Return the same rows, converted from columnar batches if a column has a user-defined type.

    Args:
        df: the rows.
        columns: the columns that the Python function takes; the filter reads one of these if possible.
    """
    if not is_user_defined(df.schema):
        return df
    nullable = {field.name for field in df.schema.fields if field.nullable}
    # The optimizer would remove the filter on a column that cannot be NULL.
    chosen = next((name for name in [*columns, *df.columns] if name in nullable), None)
    return df if chosen is None else df.where(source(chosen).isNull() >= False)


def is_user_defined(kind: DataType) -> bool:
    """Return whether a type is user-defined or contains a user-defined type."""
    from pyspark.sql.types import UserDefinedType  # noqa: PLC0415  (ranks read this package without Spark)

    if isinstance(kind, UserDefinedType):
        return True
    if kind.typeName() == "struct":
        return any(is_user_defined(field.dataType) for field in kind.fields)  # type: ignore[attr-defined]
    inside = {"array": ("elementType",), "map": ("keyType", "valueType")}.get(kind.typeName(), ())
    return any(is_user_defined(getattr(kind, part)) for part in inside)
