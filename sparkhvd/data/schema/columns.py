"""Converts columns of Arrow data to the numpy arrays of a batch.

``stored_names`` lists the columns to read from a file, ``empty`` allocates arrays, and ``decode`` converts columns. The
first dimension of every array is the rows, so slices, ``np.take`` and assignment work for every column:

==========================  ==============================================================
column                      array of ``n`` rows
==========================  ==============================================================
numbers, booleans           their numpy type, shape ``(n, *column.shape)``
decimals                    int64 if the scale is 0 (up to 18 digits), else float64 (up to 15 digits), else ``object``
                            (``decimal.Decimal``)
dates, timestamps           ``datetime64[D]``, ``datetime64[us]`` (UTC; ``[ms]`` or ``[ns]`` if a file has it)
strings, binary             ``object`` (``str``, ``bytes``)
vectors                     float64, shape ``(n, size)``
sparse vectors, on request  a structured array of shape ``(n,)`` with ``indices`` and ``values``, padded to the row with
                            the most entries; ``coordinates`` and ``to_dense`` read it
==========================  ==============================================================
"""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from sparkhvd._util.counts import counted
from sparkhvd.data.schema import codecs
from sparkhvd.data.schema.arrow_values import to_values
from sparkhvd.data.schema.data_schema import OBJECTS, ColumnSpec, DataSchema
from sparkhvd.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

Array = npt.NDArray[np.generic]
T = TypeVar("T")

# A decimal of at most this many digits survives the conversion to a double: rounding to its digits restores it.
FLOAT_DIGITS = 15
INTEGER_DIGITS = 18
_LARGEST_PRECISION = 38  # of Spark's decimals
VECTOR_FIELDS = ("type", "size", "indices", "values")  # Spark's struct of an ML vector
_DENSE = 1
_OBJECT_BYTES = 64  # an estimate, for planning


def stored_names(schema: DataSchema) -> list[str]:
    """Return the columns to read from a Parquet file; a dot separates a struct from its field."""
    return [".".join(column.path) for column in schema.columns]


def open_parquet(file: pa.NativeFile) -> parquet.ParquetFile:
    """Open a Parquet file; Spark's 96-bit timestamps become microseconds."""
    from pyarrow import parquet  # noqa: PLC0415  (heavy)

    return parquet.ParquetFile(file, coerce_int96_timestamp_unit="us")


def stored(batch: pa.RecordBatch, column: ColumnSpec) -> pa.Array:
    """Return the column's Arrow array from a batch with the columns of ``stored_names``."""
    import pyarrow.compute as pc  # noqa: PLC0415  (heavy)

    first, *fields = column.path
    array = _plain(batch.column(first))
    for field in fields:
        array = _plain(pc.struct_field(array, [field]))
    return array


def plain_type(arrow: pa.DataType) -> pa.DataType:
    """Return the plain type in which Spark reads an extension type, a view type or a decimal of another width."""
    import pyarrow as pa  # noqa: PLC0415

    while isinstance(arrow, pa.BaseExtensionType):
        arrow = arrow.storage_type
    if any(_is(f"decimal{bits}", arrow) for bits in (32, 64, 256)) and arrow.precision <= _LARGEST_PRECISION:
        return pa.decimal128(arrow.precision, arrow.scale)
    if _is("string_view", arrow):
        return pa.large_string()
    if _is("binary_view", arrow):
        return pa.large_binary()
    return pa.large_list(arrow.value_field) if _is("list_view", arrow) or _is("large_list_view", arrow) else arrow


def _is(kind: str, arrow: pa.DataType) -> bool:
    """Return whether a type is of this kind; False if this version of pyarrow does not know the kind."""
    import pyarrow as pa  # noqa: PLC0415

    check = getattr(pa.types, f"is_{kind}", None)
    return check is not None and bool(check(arrow))


def _plain(array: pa.Array) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415

    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    plain = plain_type(array.type)
    return array if array.type == plain else array.cast(plain)


def array_type(column: ColumnSpec) -> np.dtype[np.generic]:
    """Return the numpy type of the column's elements in memory."""
    if column.sparse:
        entries = _require_known(column, column.entries)
        return np.dtype([("indices", np.int32, (entries,)), ("values", np.float64, (entries,))])
    return np.dtype(object if column.dtype in OBJECTS else column.dtype)


def row_shape(column: ColumnSpec) -> tuple[int, ...]:
    """Return the shape of one row in memory."""
    return () if column.sparse else _require_known(column, column.shape)


def row_bytes(schema: DataSchema) -> int:
    """Return the size of one row in memory in bytes, at least 1; the size of Python objects is an estimate."""
    return max(1, sum(column_bytes(column) for column in schema.columns))


def empty(column: ColumnSpec, rows: int) -> Array:
    """Allocate an array for this number of rows."""
    return np.empty((rows, *row_shape(column)), array_type(column))


def no_rows(schema: DataSchema) -> dict[str, Array]:
    """Return the columns of a batch without rows."""
    return {column.name: empty(column, 0) for column in schema.columns}


def blank(column: ColumnSpec, rows: int) -> Array:
    """Return synthetic rows of zeros and empty strings, for a trial of a model."""
    array = np.zeros((rows, *row_shape(column)), array_type(column))
    if column.sparse:
        array["indices"] = -1
    if column.dtype in OBJECTS:
        array[...] = {"str": "", "bytes": b"", "decimal": Decimal(0)}[column.dtype]
    return array


def flat_rows(array: Array) -> Array:
    """Return the values of each row in one dimension, even if there are no rows."""
    return array.reshape(len(array), math.prod(array.shape[1:]))


def coordinates(array: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the row, the index in the row and the value of every stored entry of a sparse column, ordered by row."""
    indices, values = array["indices"], array["values"]  # type: ignore[call-overload]
    rows, positions = np.nonzero(indices >= 0)
    return rows, indices[rows, positions].astype(np.int64), values[rows, positions]


def sparse_widths(schema: DataSchema) -> dict[str, int]:
    """Return the vector sizes of the sparse columns, by column name."""
    return {column.name: _require_known(column, column.shape)[0] for column in schema.columns if column.sparse}


def to_dense(array: Array, column: ColumnSpec) -> Array:
    """Return a sparse column as a dense array of shape ``(rows, size)``; any other column unchanged."""
    if not column.sparse:
        return array
    dense = np.zeros((len(array), *_require_known(column, column.shape)))
    rows, positions, values = coordinates(array)
    dense[rows, positions] = values
    return dense


def decode(batch: pa.RecordBatch, column: ColumnSpec, where: str) -> Array:
    """Return the column of an Arrow batch as an array of ``row_shape``, without a copy where Arrow allows it.

    Raises:
        DataError: see ``to_numpy``.
    """
    return to_numpy(stored(batch, column), column, where)


def to_numpy(array: pa.Array, column: ColumnSpec, where: str) -> Array:
    """Return an Arrow array as numpy, shape ``(rows, *row_shape(column))``, without a copy where Arrow allows it.

    Raises:
        DataError: the array holds NULL without a fill, or its lengths or type differ from ``column``.
    """
    import pyarrow as pa  # noqa: PLC0415  (heavy)

    shape = _require_known(column, column.shape)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if column.codec not in {None, "scalar"}:
        _refuse_null(array, column, where)
        return codecs.decode(array, column, array_type(column), shape, _column_text(column, where))
    if column.kind == "vector" and pa.types.is_struct(array.type):
        return _vectors(array, column, where)
    if column.sparse:
        raise DataError(
            f"{_column_text(column, where)} is not stored as a vector, so it cannot be read as a sparse column. "
            "Prepare the data again."
        )
    return _nested(array, shape, column, where)


def _check_lengths(actual: npt.NDArray[np.int64], expected: int, what: str, column: ColumnSpec, where: str) -> None:
    if (actual != expected).any():
        raise DataError(
            f"{_column_text(column, where)} has {what} of length {length_range(actual)}, expected {expected}. All "
            f"{what} of a column must have the same length: pad or cut them, or leave the column out."
        )


def length_range(actual: npt.NDArray[np.int64]) -> str:
    """Return the shortest and the longest of some lengths for a message, or the only length."""
    low, high = actual.min(), actual.max()
    return str(low) if low == high else f"{low} to {high}"


def lengths(array: pa.Array) -> npt.NDArray[np.int64] | None:
    """Return the lengths of arrays or vectors, 0 for NULL; None for anything else."""
    import pyarrow as pa  # noqa: PLC0415

    if pa.types.is_struct(array.type):
        kinds, sizes, _, values = array.flatten()
        sizes_of_rows = np.where(_filled(kinds, _DENSE) == _DENSE, _counts(values), _filled(sizes, 0))
        return sizes_of_rows.astype(np.int64)
    if _is_list(array.type):
        return _counts(array)
    return None


def _column_text(column: ColumnSpec, where: str) -> str:
    return f"Column {column.name!r} in {where}"


def _require_known(column: ColumnSpec, value: T | None) -> T:
    if value is None:
        raise DataError(f"The shape of column {column.name!r} is unknown; read the schema from the manifest.")
    return value


def column_bytes(column: ColumnSpec) -> int:
    """Return the size of one row of a column in memory in bytes; the size of Python objects is an estimate."""
    size = _OBJECT_BYTES if column.dtype in OBJECTS else array_type(column).itemsize
    return size * math.prod(row_shape(column))


def _is_list(arrow: pa.DataType) -> bool:
    import pyarrow as pa  # noqa: PLC0415

    return bool(pa.types.is_list(arrow) or pa.types.is_large_list(arrow) or pa.types.is_fixed_size_list(arrow))


def _refuse_null(array: pa.Array, column: ColumnSpec, where: str) -> None:
    if array.null_count and column.fill is None:
        raise DataError(
            f"{_column_text(column, where)} contains NULL. Set fill for this column, or write the rows again without "
            "those with NULL."
        )


def _type_error(array: pa.Array, column: ColumnSpec, where: str) -> DataError:
    return DataError(
        f"{_column_text(column, where)} has the type {array.type}, but the manifest says {column.dtype} of shape "
        f"{column.shape}. Prepare the data again."
    )


def _nested(array: pa.Array, shape: tuple[int, ...], column: ColumnSpec, where: str) -> Array:
    """Convert nested arrays level by level; without NULL, values are copied only where Arrow requires it."""
    if _is_list(array.type) != bool(shape):
        raise _type_error(array, column, where)
    _refuse_null(array, column, where)
    if not shape:
        return _scalars(array, column, where)
    valid = ~_is_null(array) if array.null_count else None
    sizes = lengths(array)
    assert sizes is not None  # noqa: S101  (the type is a list)
    sizes = sizes if valid is None else sizes[valid]
    _check_lengths(sizes, shape[0], "arrays" if shape == column.shape else "inner arrays", column, where)
    inner = _nested(array.flatten(), shape[1:], column, where).reshape(len(sizes), *shape)
    if valid is None:
        return inner
    fill = _scalars(_null_like(array), column, where)[0]
    whole = np.full((len(array), *shape), fill, inner.dtype)
    whole[valid] = inner
    return whole


def _null_like(array: pa.Array) -> pa.Array:
    """Return one NULL of the innermost elements' type."""
    import pyarrow as pa  # noqa: PLC0415

    element = array.type
    while _is_list(element):
        element = element.value_type
    return pa.nulls(1, element)


def _scalars(array: pa.Array, column: ColumnSpec, where: str) -> Array:
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415

    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    array = _plain(array)
    if array.null_count and pa.types.is_decimal(array.type):
        return _filled_decimals(array, column, where)
    if array.null_count:
        array = pc.fill_null(array, _fill_scalar(column, array.type))
    values: Array
    if pa.types.is_decimal128(array.type) and column.dtype != "decimal":
        values = _decimals(array, column, where)
    else:
        values = to_values(array)
        if column.dtype.startswith("datetime64") and values.dtype == np.int64:
            values = values.view(column.dtype)
        elif column.dtype in OBJECTS and _is_object(array.type, column.dtype):
            return values.astype(object, copy=False)
    if column.codec == "scalar":
        return _as_declared(values, column, where)
    if values.dtype != array_type(column) or column.dtype in OBJECTS:
        raise _type_error(array, column, where)
    return values


def _filled_decimals(array: pa.Array, column: ColumnSpec, where: str) -> Array:
    """Convert decimals and then put in the fill: the column's type in memory holds it, its decimal type may not."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415

    null = _is_null(array)
    values = _scalars(pc.fill_null(array, pa.scalar(Decimal(0), array.type)), column, where)
    fill: Any = Decimal(str(column.fill)) if column.dtype == "decimal" else column.fill
    values[null] = fill
    return values


def _as_declared(values: Array, column: ColumnSpec, where: str) -> Array:
    """Convert numbers to their declared type: integers exactly, floats to the nearest value."""
    with np.errstate(invalid="ignore", over="ignore"):
        declared = values.astype(array_type(column))
    is_rounded = values.dtype.kind == "f" and declared.dtype.kind == "f"
    if not is_rounded and (declared != values).any():
        wrong = values[declared != values][0]
        raise DataError(
            f"{_column_text(column, where)} contains {wrong}, which its declared type {column.dtype} cannot hold. "
            "Write the dataset again with a wider type, or leave the column out."
        )
    return declared


def _is_object(arrow: pa.DataType, dtype: str) -> bool:
    import pyarrow as pa  # noqa: PLC0415

    types = pa.types
    if dtype == "decimal":
        return bool(types.is_decimal(arrow))
    if dtype == "str":
        return bool(types.is_string(arrow) or types.is_large_string(arrow))
    return bool(types.is_binary(arrow) or types.is_large_binary(arrow) or types.is_fixed_size_binary(arrow))


def decimal_dtype(precision: int, scale: int) -> str:
    """Return the number type that preserves every decimal of this precision and scale, or ``decimal``."""
    if scale == 0 and precision <= INTEGER_DIGITS:
        return "int64"
    return "float64" if precision <= FLOAT_DIGITS and scale >= 0 else "decimal"


def _decimals(array: pa.Array, column: ColumnSpec, where: str) -> Array:
    """Return exact integers, or the double nearest to each decimal."""
    if decimal_dtype(array.type.precision, array.type.scale) != column.dtype:
        raise _type_error(array, column, where)
    words = np.frombuffer(array.buffers()[1], np.int64)[2 * array.offset : 2 * (array.offset + len(array)) : 2]
    if column.dtype == "int64":
        return words.copy()
    # Both operands are exact in a double, so the result is rounded only once; Arrow's cast multiplies by 10**-scale.
    doubles: Array = words.astype(np.float64) / 10.0**array.type.scale
    return doubles


def _fill_scalar(column: ColumnSpec, arrow: pa.DataType) -> pa.Scalar:
    import pyarrow as pa  # noqa: PLC0415

    fill: object = column.fill
    if column.dtype.startswith("datetime64"):
        moment = np.datetime64(str(fill)).astype(column.dtype)
        return pa.scalar(int(moment.astype(np.int64)), pa.int64() if pa.types.is_integer(arrow) else arrow)
    if column.dtype == "bytes":
        fill = str(fill).encode()
    return pa.scalar(fill, arrow)


def _counts(lists: pa.Array) -> npt.NDArray[np.int64]:
    import pyarrow.compute as pc  # noqa: PLC0415

    return _filled(pc.list_value_length(lists), 0)


def _filled(array: pa.Array, value: int) -> npt.NDArray[np.int64]:
    import pyarrow.compute as pc  # noqa: PLC0415

    filled = pc.fill_null(array, value) if array.null_count else array
    return to_values(filled).astype(np.int64, copy=False)


def _is_null(array: pa.Array) -> npt.NDArray[np.bool_]:
    return to_values(array.is_null()).astype(np.bool_, copy=False)


def _vectors(array: pa.StructArray, column: ColumnSpec, where: str) -> Array:
    """Convert Spark's ML vectors; one column may mix dense and sparse vectors."""
    _refuse_null(array, column, where)
    (size,) = _require_known(column, column.shape)
    sizes = lengths(array)
    assert sizes is not None  # noqa: S101  (the type is a struct)
    null = _is_null(array)
    _check_lengths(sizes[~null], size, "vectors", column, where)
    kinds, _, indices, values = array.flatten()
    stored_values = np.asarray(to_values(values.flatten()), np.float64)
    is_dense = (_filled(kinds, _DENSE) == _DENSE) & ~null
    if is_dense.all() and not column.sparse:
        return stored_values.reshape(len(array), size)
    counts = _counts(values)
    rows = np.repeat(np.arange(len(array)), counts)
    positions = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    stored_positions = np.asarray(to_values(indices.flatten()), np.int64)
    if len(stored_positions) and not 0 <= stored_positions.min() <= stored_positions.max() < size:
        raise DataError(
            f"{_column_text(column, where)} has vector indices outside 0 to {size - 1}; the data are damaged."
        )
    positions[~is_dense[rows]] = stored_positions
    if not column.sparse:
        dense = np.zeros((len(array), size))
        dense[rows, positions] = stored_values
        dense[null] = 0.0 if column.fill is None else float(column.fill)
        return dense
    is_entry = (stored_values != 0) | ~is_dense[rows]
    return from_entries(len(array), rows[is_entry], positions[is_entry], stored_values[is_entry], column, where)


def from_entries(  # noqa: PLR0917
    count: int,
    rows: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    column: ColumnSpec,
    where: str,
) -> Array:
    """Return entries, which must be ordered by row, as the structured array of a sparse column."""
    counts = np.bincount(rows, minlength=count)
    if column.entries is not None and counts.max(initial=0) > column.entries:
        raise DataError(
            f"{_column_text(column, where)} has a row of {counted(counts.max(), 'entry', 'entries')}, but the manifest "
            f"says at most {column.entries}. Prepare the data again."
        )
    slots = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    sized_column = column if column.entries is not None else replace(column, entries=max(1, int(counts.max(initial=0))))
    array = np.zeros(count, array_type(sized_column))
    array["indices"] = -1
    array["indices"][rows, slots] = positions
    array["values"][rows, slots] = values
    return array
