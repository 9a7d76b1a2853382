"""What columns a model's outputs become: declared before anything runs, made in the executors.

An output is an array whose first dimension are the rows. What is asked for it is one of

=================  ==================================================================================================
``"auto"``         a number for one value per row where the label was a number too, else a vector
``"vector"``       a dense ML vector with all values, the usual form of probabilities
``"array"``        arrays inside arrays, in the shape of the output, of floats
``"scalar"``       a number; the output must have one value per row
``"label"``        the type of the label: the class with the highest value where there are several for a label that is
                   a number, else the values themselves, rounded for integers; null where that is no such number
                   (NaN, or beyond the type)
a type of Spark's  ``"double"``, ``"int"``, ``"array<float>"``, ``"struct<no float, yes float>"``... A struct has a
                   field for every value, or what a ``prediction_fn`` gave under the names of its fields
=================  ==================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sparkhvd.data.schema.data_schema import ColumnSpec
from sparkhvd.errors import ModelOutputError, ParamError, SchemaError
from sparkhvd.estimators.plugin import Predicted

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType

AUTO = "auto"
TYPE_KEYWORDS = (AUTO, "vector", "array", "scalar", "label")
_SPARK_NAME = {
    "bool": "boolean",
    "int8": "tinyint",
    "uint8": "smallint",
    "int16": "smallint",
    "uint16": "int",
    "int32": "int",
    "uint32": "bigint",
    "int64": "bigint",
    "float32": "float",
}


@dataclass(frozen=True)
class OutputSpec:
    """One output of a model.

    Attributes:
        shape: shape of one row.
        element: numpy name of the elements in Spark: float32 or float64.
        vector: whether the column is an ML vector unless something else is asked for; else it is one number per row.
    """

    shape: tuple[int, ...]
    element: str
    vector: bool


@dataclass(frozen=True)
class OutputColumn:
    """What an executor makes of one output.

    Attributes:
        name: the column, for messages.
        type: its type as Spark writes it; a vector is an array of doubles on its way.
        vector: whether it becomes an ML vector at the end.
        shape: shape of one row where the model's own outputs are declared; None takes what fits the type.
        best: whether the place of the highest value is taken where a row has several.
    """

    name: str
    type: str
    vector: bool = False
    shape: tuple[int, ...] | None = None
    best: bool = False


def output_column(name: str, kind: str, known: OutputSpec | None, label: ColumnSpec | None) -> OutputColumn:
    """The column for an output.

    Args:
        name: the column's name.
        kind: what was asked for; see the module.
        known: the model's own output; None where a ``prediction_fn`` gives another one.
        label: the label that the output predicts, if it is known.

    Raises:
        ParamError: what was asked for cannot be made of this output.
    """
    if kind == "label":
        return _as_label(name, known, label)
    if kind == AUTO and known is None:
        raise ParamError(
            f"The type of output column {name!r} is not known, because prediction_fn makes more of the model's "
            f"outputs. Say it with setOutputTypes; there are {', '.join(map(repr, TYPE_KEYWORDS[1:]))} and Spark's own "
            "types."
        )
    shape = None if known is None else known.shape
    if kind == AUTO and known is not None:
        kind = "vector" if known.vector else ("float" if known.element == "float32" else "double")
    if kind == "scalar":
        kind = "float" if known is not None and known.element == "float32" else "double"
    if kind == "vector":
        return OutputColumn(name, "array<double>", vector=True, shape=shape)
    if kind == "array":
        depth = 1 if shape is None else max(1, len(shape))
        return OutputColumn(name, "array<" * depth + "float" + ">" * depth, shape=shape)
    number = "<" not in kind
    if number and shape is not None and math.prod(shape) != 1:
        raise ParamError(
            f"Output column {name!r} is to be {kind!r}, one value per row, but the output has rows of shape "
            f"{list(shape)}. Ask for 'vector', 'array', 'label' (the likeliest class) or a struct, or make one value "
            "of them with prediction_fn."
        )
    return OutputColumn(name, kind, shape=shape)


def default_output_names(labels: Sequence[str]) -> list[str]:
    """The columns of the outputs that are trained on these labels, where no others are given."""
    return [f"{label}__output" for label in labels]


def check_output_names(names: Sequence[str], taken: Sequence[str]) -> None:
    """Refuse output columns whose names, in whatever case, are those of columns that are there.

    Raises:
        SchemaError: of the first one.
    """
    there = {column.lower() for column in taken}
    for name in names:
        if name.lower() in there:
            raise SchemaError(
                f"The DataFrame has a column {name!r} already, where transform would put the model's output. Drop "
                "it, or choose another name with setOutputCols."
            )


def check_types(
    names: Sequence[str], kinds: Sequence[str], known: Sequence[OutputSpec], labels: Sequence[ColumnSpec]
) -> None:
    """Refuse what a model's outputs cannot become, before it is trained.

    Args:
        names: the output columns.
        kinds: what was asked for, by output.
        known: the outputs; empty where their shapes are not known yet.
        labels: the label columns; empty where they are not known yet.

    Raises:
        ParamError: a type is none, or no output becomes it, or not this one.
    """
    for place, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if kind != AUTO and (kind != "label" or labels):
            output, label = known[place] if known else None, labels[place] if labels else None
            spark_type(output_column(name, kind, output, label))


def _as_label(name: str, known: OutputSpec | None, label: ColumnSpec | None) -> OutputColumn:
    if label is None:
        raise ParamError(
            f"Output column {name!r} is to have the type of its label, but the model knows no label column for it. "
            "Name the type itself, such as 'bigint'."
        )
    element = _SPARK_NAME.get(label.dtype, "double")
    shape = None if known is None else known.shape
    if label.kind == "scalar":
        return OutputColumn(name, element, shape=shape, best=True)
    if label.kind == "vector":
        return OutputColumn(name, "array<double>", vector=True, shape=shape)
    return OutputColumn(name, "array<" * label.depth + element + ">" * label.depth, shape=shape)


def spark_type(column: OutputColumn) -> DataType:
    """The type of the column on its way out of the executor.

    Raises:
        ParamError: Spark knows no such type, or it holds something that no output becomes.
    """
    try:
        found = _parsed(column.type)
    except Exception as error:
        raise ParamError(
            f"Output column {column.name!r} is to have the type {column.type!r}, which is none: there are "
            f"{', '.join(map(repr, TYPE_KEYWORDS))} and Spark's own types, such as 'array<float>'."
        ) from error
    _refuse_others(found, column)
    return found


@cache  # it asks Spark
def _parsed(ddl: str) -> DataType:
    from pyspark.sql.types import DataType  # noqa: PLC0415  (executors need none of this)

    return DataType.fromDDL(ddl)


def _refuse_others(found: DataType, column: OutputColumn) -> None:
    from pyspark.sql import types  # noqa: PLC0415

    if isinstance(found, types.StructType):
        for field in found.fields:
            _refuse_others(field.dataType, column)
    elif isinstance(found, types.ArrayType):
        _refuse_others(found.elementType, column)
    elif isinstance(found, types.DecimalType) or not isinstance(
        found, types.NumericType | types.BooleanType | types.StringType
    ):
        raise ParamError(
            f"Output column {column.name!r} is to have the type {column.type!r}, but no output becomes a "
            f"{found.simpleString()}; there are numbers, booleans, strings, and arrays and structs of them."
        )


def encode_output(prediction: Predicted, column: OutputColumn, arrow: pa.DataType) -> pa.Array:
    """The Arrow array of a column.

    Raises:
        ModelOutputError: the output has another shape than the type has room for; the message names both.
    """
    import pyarrow as pa  # noqa: PLC0415  (heavy)

    if isinstance(prediction, Mapping):
        return _fields(prediction, column, arrow)
    if column.shape is not None and prediction.shape[1:] != column.shape:
        raise ModelOutputError(
            f"Output column {column.name!r}: the model gave rows of shape {list(prediction.shape[1:])}; they were "
            f"{list(column.shape)} when it was made. If prediction_fn changes them, say so with setOutputTypes."
        )
    flat = prediction.reshape(len(prediction), math.prod(prediction.shape[1:]))
    if pa.types.is_struct(arrow):
        if flat.shape[1] != arrow.num_fields:
            raise _no_room(prediction, column)
        return _fields({arrow.field(place).name: flat[:, place] for place in range(arrow.num_fields)}, column, arrow)
    if column.best and flat.shape[1] > 1:
        # NaN would be the highest value: a row with one has no class.
        places = np.where(np.isnan(flat).any(axis=1), np.nan, flat.argmax(axis=1))
        return _nested(places, column, arrow)
    return _nested(flat if column.vector else prediction, column, arrow)


def _fields(parts: Mapping[str, npt.NDArray[np.generic]], column: OutputColumn, arrow: pa.DataType) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415

    names = [arrow.field(place).name for place in range(arrow.num_fields)] if pa.types.is_struct(arrow) else []
    if set(names) != set(parts):
        raise ModelOutputError(
            f"Output column {column.name!r} has the type {column.type!r}, but prediction_fn gave the fields "
            f"{sorted(parts)}."
        )
    arrays = [_nested(np.asarray(parts[name]), column, arrow.field(name).type) for name in names]
    return pa.StructArray.from_arrays(arrays, fields=[arrow.field(name) for name in names])


def _nested(values: npt.NDArray[np.generic], column: OutputColumn, arrow: pa.DataType) -> pa.Array:
    """Arrays inside arrays as deep as the type says; the elements are one block of memory."""
    import pyarrow as pa  # noqa: PLC0415

    lists, element = [], arrow
    while pa.types.is_list(element):
        lists.append(element)
        element = element.value_type
    sizes = values.shape[: len(lists) + 1]
    if len(sizes) <= len(lists) or math.prod(values.shape) != math.prod(sizes):
        raise _no_room(values, column)
    found = _elements(values.reshape(-1), element)
    for level in range(len(lists), 0, -1):
        offsets = np.arange(math.prod(sizes[:level]) + 1, dtype=np.int32) * np.int32(sizes[level])
        found = pa.ListArray.from_arrays(pa.array(offsets), found, type=lists[level - 1])
    return found


def _elements(values: npt.NDArray[Any], element: pa.DataType) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415

    if pa.types.is_string(element) or pa.types.is_large_string(element):
        return pa.array([str(value) for value in values.tolist()], element)
    numpy_type = np.dtype(element.to_pandas_dtype())
    if numpy_type.kind not in "iub" or np.can_cast(values.dtype, numpy_type):
        return pa.array(np.ascontiguousarray(values, dtype=numpy_type), element)
    if values.dtype.kind == "f":
        values = np.rint(values.astype(np.float64))
    if numpy_type.kind == "b":
        fits = ~np.isnan(values)
    else:
        limits = np.iinfo(numpy_type)
        fits = (values >= float(limits.min)) & (values < float(limits.max) + 1.0)
    return pa.array(np.where(fits, values, 0).astype(numpy_type), element, mask=~fits)


def _no_room(values: npt.NDArray[np.generic], column: OutputColumn) -> ModelOutputError:
    return ModelOutputError(
        f"Output column {column.name!r} has the type {column.type!r}, which has no place for rows of shape "
        f"{list(values.shape[1:])}."
    )
