"""Arrow functions on Spark 3.5 and 4.0, which pass columns to and from Python functions only through pandas.

pandas represents NULL among numbers by NaN, and converts integers in the same column to floats. Therefore numbers that
may be NULL are sent as two columns: the values, with 0 in place of NULL, and flags that mark NULL. Structs are sent as
their fields, because pandas would turn them into one dictionary per row. The results are wrapped in pandas objects that
hold Arrow arrays, which Spark's conversion leaves unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

# Takes tuples of Arrow arrays, one array per column, and yields Arrow arrays; runs in Spark's tasks.
ArrowFunction = Callable[[Iterator[Sequence["pa.Array"]]], Iterator["pa.Array"]]

# For each number type, a value that arrays seldom contain; see _may_hold_null.
_RARE_VALUES = {
    "tinyint": -(2**7),
    "smallint": -(2**15),
    "int": -(2**31),
    "bigint": -(2**63),
    "float": 2.0**-100,
    "double": 2.0**-100,
}


@dataclass(frozen=True)
class SentColumn:
    """The form in which a column is sent.

    Attributes:
        form: ``number`` and ``array`` (of numbers, also nested) are sent with a column of flags that mark NULL if
            ``nullable``; a ``struct`` is sent as its fields; ``object`` is sent unchanged, because pandas represents
            its NULLs.
        nullable: whether a column of flags accompanies it; an ``object`` never has one.
        arrow: the Arrow type of the column.
        fields: the fields of a struct.
    """

    form: Literal["number", "array", "struct", "object"]
    nullable: bool
    arrow: pa.DataType
    fields: tuple[SentColumn, ...] = ()


def arrow_column_by_pandas(
    df: DataFrame, function: ArrowFunction, result_type: DataType, columns: Sequence[Column | str]
) -> Column:
    """Return the column that an Arrow function computes; see ``sparkhvd.compat.spark.arrow_column``."""
    from pyspark.sql import functions  # noqa: PLC0415 - executors import this module, too
    from pyspark.sql.pandas.functions import pandas_udf  # noqa: PLC0415

    fields = df.select(*columns).schema.fields
    sent = []
    parts: list[Column] = []
    for column, field in zip(columns, fields, strict=True):
        value = functions.col(column) if isinstance(column, str) else column
        form, field_parts = _encode_column(value, field.dataType, nullable=field.nullable)
        sent.append(form)
        parts += field_parts
    udf: Any = pandas_udf(_pandas_function(function, tuple(sent), len(parts)), result_type)  # type: ignore[call-overload]
    # Each column is passed twice, as in ``arrow_column``, and because Spark passes a single column without a tuple.
    return udf(*parts, *parts)  # type: ignore[no-any-return]


def _encode_column(value: Column, data_type: DataType, *, nullable: bool) -> tuple[SentColumn, list[Column]]:
    """Return the form of a column, and the columns to send for it."""
    from pyspark.sql import functions  # noqa: PLC0415
    from pyspark.sql.pandas.types import to_arrow_type  # noqa: PLC0415

    if data_type.typeName() == "struct":
        fields, parts = [], [value.isNull()] if nullable else []
        for field in data_type.fields:  # type: ignore[attr-defined]
            form, field_parts = _encode_column(
                value.getField(field.name), field.dataType, nullable=nullable or field.nullable
            )
            fields.append(form)
            parts += field_parts
        return SentColumn("struct", nullable, to_arrow_type(data_type), tuple(fields)), parts
    element, depth, null_inside = data_type, 0, False
    while element.typeName() == "array":
        null_inside = null_inside or element.containsNull  # type: ignore[attr-defined]
        element, depth = element.elementType, depth + 1  # type: ignore[attr-defined]
    name = element.simpleString()
    arrow = to_arrow_type(data_type)
    if name not in _RARE_VALUES:
        return SentColumn("object", nullable, arrow), [value]
    zero = functions.lit(0).cast(name)
    if not depth:
        parts = [functions.coalesce(value, zero), value.isNull()] if nullable else [value]
        return SentColumn("number", nullable, arrow), parts
    if not null_inside:
        return SentColumn("array", False, arrow), [value]
    suspect = _may_hold_null(value, name, depth)
    filled = functions.when(
        suspect, _map_elements(value, depth, lambda item: functions.coalesce(item, zero))
    ).otherwise(value)
    return SentColumn("array", True, arrow), [
        filled,
        functions.when(suspect, _map_elements(value, depth, lambda item: item.isNull())),
    ]


def _may_hold_null(array: Column, element: str, depth: int) -> Column:
    """Return a condition that is false only for arrays without NULL.

    ``array_contains`` returns NULL if the array lacks the value but holds NULL. It is compiled, and takes a fraction of
    the time of ``exists``.
    """
    from pyspark.sql import functions  # noqa: PLC0415

    for _ in range(depth - 1):
        array = functions.flatten(array)
    contains = functions.array_contains(array, functions.lit(_RARE_VALUES[element]).cast(element))
    return functions.coalesce(contains, functions.lit(True))


def _map_elements(array: Column, depth: int, function: Any) -> Column:
    """Return a nested array with ``function`` applied to each innermost element."""
    from pyspark.sql import functions  # noqa: PLC0415

    if not depth:
        return function(array)  # type: ignore[no-any-return]
    return functions.transform(array, lambda inner: _map_elements(inner, depth - 1, function))


def _pandas_function(function: ArrowFunction, sent: tuple[SentColumn, ...], count: int) -> Any:
    """Return the pandas function of an Arrow function, with the annotations that Spark reads."""
    import pandas as pd  # noqa: PLC0415  (heavy)

    def predict(batches: Any) -> Any:
        return map(to_pandas, function(from_pandas(sent, batch[:count]) for batch in batches))

    predict.__annotations__ = {"batches": Iterator[tuple[pd.Series, ...]], "return": Iterator[pd.Series]}
    return predict


def from_pandas(sent: Sequence[SentColumn], parts: Sequence[pd.Series[Any]]) -> tuple[pa.Array, ...]:
    """Return the Arrow arrays of the columns that were sent in these parts."""
    remaining = iter(parts)
    return tuple(_rebuild_column(column, remaining) for column in sent)


def _rebuild_column(column: SentColumn, parts: Iterator[pd.Series[Any]]) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415  (heavy)

    if column.form == "struct":
        nulls = pa.array(_null_flags(next(parts))) if column.nullable else None
        arrays = [_rebuild_column(field, parts) for field in column.fields]
        fields = [pa.field(column.arrow.field(index).name, array.type) for index, array in enumerate(arrays)]
        return pa.StructArray.from_arrays(arrays, fields=fields, mask=nulls)
    values = next(parts)
    if column.form == "object":
        return pa.array(values, column.arrow)
    if column.form == "number":
        nulls = _null_flags(next(parts)) if column.nullable else None
        return pa.array(values.to_numpy(), column.arrow, mask=nulls, from_pandas=False)
    rows = list(values)
    if column.nullable:
        for index, flags in enumerate(next(parts)):
            if flags is not None:
                rows[index] = _with_nulls(rows[index], flags)
    return pa.array(rows, column.arrow, from_pandas=False)


def _null_flags(nulls: pd.Series[Any]) -> Any:
    return nulls.to_numpy(dtype=bool)


def _with_nulls(values: Any, flags: Any) -> Any:
    """Return an array as nested lists, with None at the positions where the flags are true."""
    if values is None or flags is None:
        return None
    if isinstance(flags, np.ndarray):
        return [_with_nulls(value, flag) for value, flag in zip(values, flags, strict=True)]
    return None if flags else values


def to_pandas(array: pa.Array) -> Any:
    """Return a pandas object that Spark converts to exactly this array: a table for a struct, else a series."""
    import pandas as pd  # noqa: PLC0415  (heavy)
    import pyarrow as pa  # noqa: PLC0415

    series, frame = _unconverted()
    if not pa.types.is_struct(array.type):
        return series(pd.arrays.ArrowExtensionArray(pa.chunked_array([array])))
    names = [array.type.field(index).name for index in range(array.type.num_fields)]
    columns = {
        name: pd.arrays.ArrowExtensionArray(pa.chunked_array([part]))
        for name, part in zip(names, array.flatten(), strict=True)
    }
    return frame(columns)


@cache
def _unconverted() -> tuple[type[pd.Series[Any]], type[pd.DataFrame]]:
    """Return the classes of a series whose values Spark cannot convert one by one, and of a table of such series.

    Spark's conversion would copy arrays element by element, and turn NaN in them into NULL.
    """
    import pandas as pd  # noqa: PLC0415  (heavy)

    class UnconvertedSeries(pd.Series):
        @property
        def _constructor(self) -> Any:
            return UnconvertedSeries

        def apply(self, *_: Any, **__: Any) -> Any:
            return self

    class UnconvertedFrame(pd.DataFrame):
        @property
        def _constructor(self) -> Any:
            return UnconvertedFrame

        @property
        def _constructor_sliced(self) -> Any:
            return UnconvertedSeries

    return UnconvertedSeries, UnconvertedFrame
