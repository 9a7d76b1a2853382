"""Maps the Arrow types of Parquet columns to columns of a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkhvd.data.schema.columns import VECTOR_FIELDS, decimal_dtype, plain_type
from sparkhvd.data.schema.data_schema import NUMBERS
from sparkhvd.data.schema.spark_types import SUPPORTED, Leaf
from sparkhvd.errors import SchemaError

if TYPE_CHECKING:
    import pyarrow as pa


def leaves(path: tuple[str, ...], arrow: pa.DataType) -> list[Leaf]:
    """Return the leaves of a column of this type, in the order of its fields.

    Raises:
        SchemaError: the type cannot be used; the message says why.
    """
    import pyarrow as pa  # noqa: PLC0415  (heavy)

    types = pa.types
    arrow = plain_type(arrow)
    if types.is_struct(arrow):
        names = tuple(arrow.field(index).name for index in range(arrow.num_fields))
        if names == VECTOR_FIELDS:  # Spark's layout of ML vectors
            return [Leaf(path, "float64", "vector", 1)]
        return [leaf for index, name in enumerate(names) for leaf in leaves((*path, name), arrow.field(index).type)]
    element, depth = arrow, 0
    while types.is_list(element) or types.is_large_list(element) or types.is_fixed_size_list(element):
        element, depth = element.value_type, depth + 1
    if types.is_dictionary(element):
        element = element.value_type
    dtype = _dtype(plain_type(element))
    if dtype is None:
        raise SchemaError(
            f"Column {'.'.join(path)!r} has the type {arrow}, which cannot be used. The supported types are "
            f"{SUPPORTED}."
        )
    return [Leaf(path, dtype, "array" if depth else "scalar", depth)]


def logical_type(arrow: pa.DataType) -> pa.DataType:
    """Return the same type for all types that store the same values; writers choose among them by size and API.

    These properties do not change the values: the width of offsets (32 or 64 bits), a dictionary, a fixed length of
    lists, required elements, and the time zone in which times are shown.
    """
    import pyarrow as pa  # noqa: PLC0415

    types = pa.types
    arrow = plain_type(arrow)
    if types.is_dictionary(arrow):
        return logical_type(arrow.value_type)
    if types.is_list(arrow) or types.is_large_list(arrow) or types.is_fixed_size_list(arrow):
        return pa.list_(logical_type(arrow.value_type))
    if types.is_struct(arrow):
        fields = [arrow.field(index) for index in range(arrow.num_fields)]
        return pa.struct([pa.field(field.name, logical_type(field.type)) for field in fields])
    if types.is_timestamp(arrow) and arrow.tz is not None:
        return pa.timestamp(arrow.unit, "UTC")
    if types.is_large_string(arrow):
        return pa.string()
    return pa.binary() if types.is_large_binary(arrow) else arrow


def _dtype(arrow: pa.DataType) -> str | None:
    import pyarrow as pa  # noqa: PLC0415

    types = pa.types
    named = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(arrow), str(arrow))
    if named in NUMBERS:
        return named
    if types.is_decimal128(arrow):
        return decimal_dtype(arrow.precision, arrow.scale)
    if types.is_timestamp(arrow):
        # numpy and Arrow have the same units; Spark writes "[us]".
        return f"datetime64[{arrow.unit}]" if arrow.unit in {"us", "ns", "ms"} else None
    if types.is_string(arrow) or types.is_large_string(arrow):
        return "str"
    if types.is_binary(arrow) or types.is_large_binary(arrow) or types.is_fixed_size_binary(arrow):
        return "bytes"
    return "datetime64[D]" if types.is_date32(arrow) else None
