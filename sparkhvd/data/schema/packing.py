"""Packs columns into arrays for the transfer from Spark to a Python function, and unpacks them there.

Spark writes to Arrow row by row, and an element of an array takes half the time of a column of its own. So scalar
columns of the same type are sent as the elements of one array, without a cast; all others are sent unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sparkhvd.data.schema.arrow_values import to_values
from sparkhvd.data.schema.data_schema import ColumnSpec
from sparkhvd.data.schema.selection import expressions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column
    from pyspark.sql.types import StructType

_ELEMENTS = frozenset({"boolean", "tinyint", "smallint", "int", "bigint", "float", "double"})


@dataclass(frozen=True)
class ColumnPacking:
    """The assignment of columns, by their indices, to what Spark sends.

    Attributes:
        arrays: for each array, the columns that become its elements.
        others: the columns that are sent unchanged; several become the fields of a struct.
    """

    arrays: tuple[tuple[int, ...], ...]
    others: tuple[int, ...]


def plan_packing(spark_schema: StructType, columns: Sequence[ColumnSpec]) -> ColumnPacking:
    """Group the columns of the same type.

    Args:
        spark_schema: ``df.schema``.
        columns: from ``select``.
    """
    types = {field.name: field.dataType for field in spark_schema.fields}
    by_type: dict[str, list[int]] = {}
    for index, column in enumerate(columns):
        kind = types[column.name].simpleString() if column.path == (column.name,) else ""
        if kind in _ELEMENTS:
            by_type.setdefault(kind, []).append(index)
    arrays = tuple(tuple(indices) for indices in by_type.values() if len(indices) > 1)
    packed = {index for indices in arrays for index in indices}
    return ColumnPacking(arrays, tuple(index for index in range(len(columns)) if index not in packed))


def packed(columns: Sequence[ColumnSpec], packing: ColumnPacking) -> tuple[list[Column], list[Column]]:
    """Return the arrays, and one column with the other columns if there are any.

    Plain names are combined into one SQL text, which takes one call to Spark instead of one per column.
    """
    from pyspark.sql import functions  # noqa: PLC0415

    def combined(word: str, indices: Sequence[int]) -> Column:
        chosen = expressions(columns[index] for index in indices)
        names = [part for part in chosen if isinstance(part, str)]
        if len(names) == len(chosen):
            return functions.expr(f"{word}({', '.join(names)})" if len(names) > 1 else names[0])
        first, *more = chosen
        return functions.struct(first, *more) if more or isinstance(first, str) else first

    others = [combined("struct", packing.others)] if packing.others else []
    return [combined("array", indices) for indices in packing.arrays], others


def unpacked(parts: Sequence[pa.Array], packing: ColumnPacking) -> list[pa.Array | npt.NDArray[np.generic]]:
    """Return the columns of a batch, in their order.

    Args:
        parts: the arrays, then the others, in the order of ``packed``.
        packing: the packing that ``packed`` used.

    Returns:
        Arrow arrays; for columns that were sent in an array without NULL, numpy arrays with their own memory.
    """
    columns: dict[int, pa.Array | npt.NDArray[np.generic]] = {}
    for indices, lists in zip(packing.arrays, parts, strict=False):
        columns.update(zip(indices, _elements(lists, len(indices)), strict=True))
    if packing.others:
        others = parts[-1]
        columns.update(zip(packing.others, others.flatten() if len(packing.others) > 1 else [others], strict=True))
    return [columns[index] for index in range(len(columns))]


def _elements(lists: pa.Array, count: int) -> Sequence[pa.Array | npt.NDArray[np.generic]]:
    values = lists.flatten()
    if values.null_count:
        return [values.take(np.arange(index, len(values), count)) for index in range(count)]
    rows = to_values(values).reshape(len(lists), count)
    return list(rows.T.copy())
