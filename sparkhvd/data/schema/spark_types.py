"""Maps Spark types to columns of a dataset, and refuses types that cannot be used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from sparkhvd.data.schema.columns import decimal_dtype
from sparkhvd.data.schema.data_schema import ColumnSpec, Fill, Kind, Role
from sparkhvd.errors import SchemaError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

SUPPORTED = (
    "boolean, byte, short, int, long, float, double, decimal, date, timestamp, string, binary, arrays of these (nested "
    "ones too), structs and ML vectors"
)

_DTYPE_OF: Mapping[str, str] = MappingProxyType(
    {
        "boolean": "bool",
        "tinyint": "int8",
        "smallint": "int16",
        "int": "int32",
        "bigint": "int64",
        "float": "float32",
        "double": "float64",
        "string": "str",
        "binary": "bytes",
        "date": "datetime64[D]",
        "timestamp": "datetime64[us]",
        "timestamp_ntz": "datetime64[us]",
    }
)
_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "map": "its keys differ from row to row; select the values as columns of their own (df.m['key'])",
        "struct": "a struct inside an array has no shape; select its fields as arrays of their own (df.a.field)",
        "vector": "a vector inside an array; select it as a column of its own",
        "void": "it holds only NULL",
    }
)
# Types that a model does not accept, and how to convert them to a number.
_TO_NUMBER: Mapping[str, str] = MappingProxyType(
    {
        "str": "index or encode it first, for example with pyspark.ml.feature.StringIndexer",
        "bytes": "decode it to an array of numbers first",
        "decimal": "no number type holds all its digits; cast it to double if you accept the rounding",
        "datetime64[D]": "turn it into a number first, for example with pyspark.sql.functions.unix_date",
        "datetime64[us]": "turn it into a number first, for example with pyspark.sql.functions.unix_micros",
        "datetime64[ms]": "turn it into a number first",
        "datetime64[ns]": "turn it into a number first",
    }
)


@dataclass(frozen=True)
class Leaf:
    """A part of a column with a numpy type: the column itself, or a field of a struct."""

    path: tuple[str, ...]
    dtype: str
    kind: Kind
    depth: int

    def column(self, role: Role) -> ColumnSpec:
        """Return the leaf as a column; the shape of an array is still unknown."""
        return ColumnSpec(
            ".".join(self.path),
            self.dtype,
            () if self.kind == "scalar" else None,
            role,
            self.kind,
            source=self.path if len(self.path) > 1 else (),
            depth=self.depth,
        )


def leaves(path: tuple[str, ...], spark_type: DataType) -> list[Leaf]:
    """Return the leaves of a column (or of a field of a struct) of this type, in the order of its fields.

    Raises:
        SchemaError: the type cannot be used; the message says why.
    """
    text = spark_type.simpleString()
    if text == "vector":
        return [Leaf(path, "float64", "vector", 1)]
    if spark_type.typeName() == "struct":
        fields = spark_type.fields  # type: ignore[attr-defined]
        if not fields:
            raise _refused(path, text, "it has no fields")
        return [leaf for field in fields for leaf in leaves((*path, field.name), field.dataType)]
    element, depth = spark_type, 0
    while element.typeName() == "array":
        element, depth = element.elementType, depth + 1  # type: ignore[attr-defined]
    return [Leaf(path, _dtype(path, element, text), "array" if depth else "scalar", depth)]


def numbers_only(column: ColumnSpec) -> None:
    """Refuse a column that only a transformation function could turn into a number.

    Raises:
        SchemaError: the column is a string, a date or the like.
    """
    if not column.is_number:
        raise SchemaError(
            f"Column {column.name!r} has the type {_TYPE_NAME.get(column.dtype, column.dtype)}, which cannot be a "
            f"{column.role} of a model: {_TO_NUMBER[column.dtype]}. (A transformation_fn can convert such columns: "
            "the model receives its result.)"
        )


def checked_fill(column: ColumnSpec, fill: Fill) -> Fill:
    """Return the value to put in place of NULL.

    Raises:
        SchemaError: the value is not of the column's type, or it is beyond its range, or it is an integer that the type
            cannot represent exactly.
    """
    value: Fill = fill.item() if isinstance(fill, np.generic) else fill
    if not _holds(column.dtype, value):
        raise SchemaError(
            f"The fill value {value!r} does not fit column {column.name!r} of type {column.dtype}. Pass a value of "
            "that type" + (", as ISO text." if column.dtype.startswith("datetime") else ".")
        )
    return value


_TYPE_NAME = {
    "str": "string",
    "bytes": "binary",
    "datetime64[D]": "date",
    **dict.fromkeys(("datetime64[ms]", "datetime64[us]", "datetime64[ns]"), "timestamp"),
}


def _holds(dtype: str, fill: Fill) -> bool:
    if dtype.startswith("datetime64"):
        return isinstance(fill, str) and _is_time(fill, dtype)
    if dtype in {"str", "bytes"} or isinstance(fill, str):
        return dtype in {"str", "bytes"} and isinstance(fill, str)
    if dtype == "bool" or isinstance(fill, bool):
        return dtype == "bool" and isinstance(fill, bool)
    if dtype == "decimal":
        return math.isfinite(_nearest(fill, "float64"))
    return _is_float(fill, dtype) if dtype.startswith("float") else _is_integer(fill, dtype)


def _is_time(text: str, dtype: str) -> bool:
    try:
        return not np.isnat(np.datetime64(text).astype(dtype))
    except ValueError:
        return False


def _is_float(fill: float, dtype: str) -> bool:
    # 0.1 has a nearest float32; a large integer may have none that is equal, and a larger number becomes infinite.
    nearest = _nearest(fill, dtype)
    return nearest == fill if isinstance(fill, int) else math.isfinite(nearest) or not math.isfinite(fill)


def _nearest(fill: float, dtype: str) -> float:
    try:
        with np.errstate(over="ignore"):
            return float(np.dtype(dtype).type(fill))
    except OverflowError:  # an integer larger than any float
        return math.inf


def _is_integer(fill: float, dtype: str) -> bool:
    limits = np.iinfo(dtype)
    return (isinstance(fill, int) or fill.is_integer()) and limits.min <= fill <= limits.max


def _dtype(path: tuple[str, ...], element: DataType, text: str) -> str:
    name = element.simpleString()
    if element.typeName() == "decimal":
        return decimal_dtype(element.precision, element.scale)  # type: ignore[attr-defined]
    plain = name.partition("(")[0].partition(" collate ")[0]
    if plain in {"char", "varchar"}:
        plain = "string"
    if plain not in _DTYPE_OF:
        why = _REASONS.get("vector" if name == "vector" else element.typeName(), "numpy has no equivalent type")
        raise _refused(path, text, why)
    return _DTYPE_OF[plain]


def _refused(path: tuple[str, ...], text: str, why: str) -> SchemaError:
    return SchemaError(
        f"Column {'.'.join(path)!r} has the type {text}, which cannot be used: {why}. The supported types are "
        f"{SUPPORTED}."
    )
