"""Spark expressions that decide which rows are held out for validation.

For a fraction, a hash of the values of a row's features and labels decides, whatever their encoding: a dense or sparse
vector of up to ``WIDE`` elements has the hash of the array with the same values, and a number has the hash of the
nearest ``double``. The columns are hashed in the order of their names, and weights are ignored. So equal rows are
always in the same split, in every preparation, however their columns are stored or ordered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkhvd.data.schema.data_schema import ColumnSpec, Fill
from sparkhvd.data.schema.selection import source, value_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# The longest vector that is hashed as an array. Longer vectors are hashed by their entries that are not 0.
WIDE = 4096


def by_fraction(columns: Sequence[ColumnSpec], fraction: float, seed: int) -> Column:
    """Return the split of a row by fraction, from the columns of the user's DataFrame."""
    from pyspark.sql import functions  # noqa: PLC0415  (ranks read this package without Spark)

    hashed = sorted((column for column in columns if column.role != "weight"), key=lambda column: column.name)
    values = [value for column in hashed for value in _canonical(column)]
    digest = functions.xxhash64(functions.lit(seed % 2**63).cast("long"), *values)
    held_out = digest < functions.lit(int(fraction * 2**64) - 2**63).cast("long")
    return functions.when(held_out, "validation").otherwise("train")


def by_column(df: DataFrame, name: str) -> Column:
    """Return the split of a row, from a column that is true or 1 for held-out rows."""
    from pyspark.sql import functions  # noqa: PLC0415

    value = source(name)
    unknown = functions.when(value.isNull(), "null")
    if df.select(value).schema[0].dataType.simpleString() == "boolean":
        return unknown.when(value, "validation").otherwise("train")
    return unknown.when(value == 1, "validation").when(value == 0, "train").otherwise("other")


def _canonical(column: ColumnSpec) -> list[Column]:
    """Return a column's values to hash. Spark's hash skips NULL, and treats -0.0 as 0.0 and all NaN as equal."""
    value = value_of(column)
    if column.kind == "vector":
        return _vector_columns(value)
    if column.is_number or column.dtype == "decimal":
        value = value.cast("array<" * column.depth + "double" + ">" * column.depth)
    fill = column.fill if column.dtype == "str" or column.fill is None else _number(column.fill)
    return [value if fill is None else _filled(value, column.depth, fill)]


def _number(fill: Fill) -> float | None:
    """Return a numeric fill, or None for times and bytes, whose NULL is hashed as NULL."""
    return None if isinstance(fill, str) else float(fill)


def _filled(value: Column, depth: int, fill: float | str) -> Column:
    """Return a column with the fill in place of NULL; a NULL array stays NULL, as its length is unknown."""
    from pyspark.sql import functions  # noqa: PLC0415

    if depth:
        return functions.transform(value, lambda element: _filled(element, depth - 1, fill))
    return functions.coalesce(value, functions.lit(fill))


def _vector_columns(vector: Column) -> list[Column]:
    """Return two columns: the elements of a vector, and the entries of a wide one; one of the two is NULL."""
    from pyspark.ml.functions import vector_to_array  # noqa: PLC0415
    from pyspark.sql import functions  # noqa: PLC0415

    stored = functions.unwrap_udt(vector)
    is_dense, indices, values = stored["type"] == 1, stored["indices"], stored["values"]
    width = functions.when(is_dense, functions.array_size(values)).otherwise(stored["size"])

    def entry(index: Column, value: Column) -> Column:
        return functions.when(value != 0, functions.xxhash64(index, value))

    of_dense = functions.transform(values, lambda value, index: entry(index, value))
    of_sparse = functions.transform(values, lambda value, number: entry(indices[number], value))
    entries = functions.when(is_dense, of_dense).otherwise(of_sparse)
    return [functions.when(width <= WIDE, vector_to_array(vector)), functions.when(width > WIDE, entries)]
