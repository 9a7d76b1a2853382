"""The Spark columns of a model's outputs: their types are set before anything runs, and executors encode the values.

An output is an array whose first dimension is the rows. Its type in Spark (``output_types``) is one of

=================  ==================================================================================================
``"auto"``         a number if the output has one value per row and the label is a number, else a vector
``"vector"``       a dense ML vector with all values, the usual form of probabilities
``"array"``        nested arrays of floats in the shape of the output
``"scalar"``       a number; the output must have one value per row
``"label"``        the type of the label. If the label is a number and the output has several values per row, the class
                   with the highest value; else the values themselves, rounded for integers. Integers and booleans
                   are NULL for NaN, integers also for values beyond the range of the type
a Spark type       ``"double"``, ``"int"``, ``"array<float>"``, ``"struct<no float, yes float>"``... A struct has a
                   field for every value, or the named values that ``prediction_fn`` returns
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

from sparkhvd._util.counts import counted
from sparkhvd.compat import spark
from sparkhvd.data.schema.columns import flat_rows
from sparkhvd.data.schema.data_schema import ColumnSpec
from sparkhvd.errors import ModelOutputError, ParamError, SchemaError
from sparkhvd.estimators.plugin import Predicted

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType

AUTO = "auto"
TYPE_KEYWORDS = (AUTO, "vector", "array", "scalar", "label")
_SPARK_TYPES = {
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
        vector: whether the column is an ML vector by default; else it is one number per row.
    """

    shape: tuple[int, ...]
    element: str
    vector: bool


@dataclass(frozen=True)
class OutputColumn:
    """The column into which an executor encodes one output.

    Attributes:
        name: the column, for messages.
        type: its Spark type in DDL; a vector leaves the executor as an array of doubles.
        vector: whether the column becomes an ML vector.
        shape: shape of one row of the model's own output; None accepts any shape that fits the type.
        best: whether the index of the highest value is the prediction if a row has several values.
    """

    name: str
    type: str
    vector: bool = False
    shape: tuple[int, ...] | None = None
    best: bool = False


def output_column(name: str, type_name: str, known: OutputSpec | None, label: ColumnSpec | None) -> OutputColumn:
    """Return the column for an output.

    Args:
        name: the column's name.
        type_name: the requested type; see the module.
        known: the model's own output; None if a ``prediction_fn`` returns another output.
        label: the label that the output predicts, if it is known.

    Raises:
        ParamError: the output cannot have the requested type.
    """
    if type_name == "label":
        return _label_column(name, known, label)
    if type_name == AUTO and known is None:
        raise ParamError(
            f"The type of output column {name!r} is unknown because prediction_fn changes the model's outputs. Set it "
            f"with setOutputTypes to one of {', '.join(map(repr, TYPE_KEYWORDS[1:]))} or to a Spark type."
        )
    shape = None if known is None else known.shape
    if type_name == AUTO and known is not None:
        type_name = "vector" if known.vector else ("float" if known.element == "float32" else "double")
    if type_name == "scalar":
        type_name = "float" if known is not None and known.element == "float32" else "double"
    if type_name == "vector":
        return OutputColumn(name, "array<double>", vector=True, shape=shape)
    if type_name == "array":
        depth = 1 if shape is None else max(1, len(shape))
        return OutputColumn(name, "array<" * depth + "float" + ">" * depth, shape=shape)
    number = "<" not in type_name
    if number and shape is not None and math.prod(shape) != 1:
        raise ParamError(
            f"Output column {name!r} has the type {type_name!r}, one value per row, but the output has rows of shape "
            f"{list(shape)}. Use 'vector', 'array', 'label' (the likeliest class) or a struct type, or reduce each row "
            "to one value with prediction_fn."
        )
    return OutputColumn(name, type_name, shape=shape)


def default_output_names(labels: Sequence[str]) -> list[str]:
    """Return the names of the output columns for these labels if ``output_cols`` is not set."""
    return [f"{label}__output" for label in labels]


def check_output_names(names: Sequence[str], taken: Sequence[str]) -> None:
    """Refuse names of output columns that are taken, ignoring upper and lower case.

    Raises:
        SchemaError: a name is taken; the message names the first one.
    """
    taken_names = {column.lower() for column in taken}
    for name in names:
        if name.lower() in taken_names:
            raise SchemaError(
                f"The DataFrame already has a column {name!r}, the name that transform would give to the model's "
                "output. Drop it, or choose another name with setOutputCols."
            )


def check_types(
    names: Sequence[str], type_names: Sequence[str], known: Sequence[OutputSpec], labels: Sequence[ColumnSpec]
) -> None:
    """Refuse types that a model's outputs cannot have, before the model is trained.

    Args:
        names: the output columns.
        type_names: the requested types, by output.
        known: the outputs; empty while their shapes are unknown.
        labels: the label columns; empty while they are unknown.

    Raises:
        ParamError: a type is unknown, or the output cannot have that type.
    """
    for index, (name, type_name) in enumerate(zip(names, type_names, strict=True)):
        if type_name != AUTO and (type_name != "label" or labels):
            output, label = known[index] if known else None, labels[index] if labels else None
            spark_type(output_column(name, type_name, output, label))


def _label_column(name: str, known: OutputSpec | None, label: ColumnSpec | None) -> OutputColumn:
    if label is None:
        raise ParamError(
            f"Output column {name!r} has the type 'label', but the model has no label column for it. Use a Spark type "
            "instead, such as 'bigint'."
        )
    element = _SPARK_TYPES.get(label.dtype, "double")
    shape = None if known is None else known.shape
    if label.kind == "scalar":
        return OutputColumn(name, element, shape=shape, best=True)
    if label.kind == "vector":
        return OutputColumn(name, "array<double>", vector=True, shape=shape)
    return OutputColumn(name, "array<" * label.depth + element + ">" * label.depth, shape=shape)


def spark_type(column: OutputColumn) -> DataType:
    """Return the type that the column has when it leaves the executor.

    Raises:
        ParamError: the type is unknown to Spark, or contains a type that outputs cannot have.
    """
    try:
        data_type = _parse_type(column.type)
    except Exception as error:
        raise ParamError(
            f"Output column {column.name!r} has the unknown type {column.type!r}; expected one of "
            f"{', '.join(map(repr, TYPE_KEYWORDS))} or a Spark type, such as 'array<float>'."
        ) from error
    _check_supported(data_type, column)
    return data_type


@cache  # parsing is a call into Spark
def _parse_type(ddl: str) -> DataType:
    return spark.data_type(ddl)


def _check_supported(data_type: DataType, column: OutputColumn) -> None:
    from pyspark.sql import types  # noqa: PLC0415

    if isinstance(data_type, types.StructType):
        for field in data_type.fields:
            _check_supported(field.dataType, column)
    elif isinstance(data_type, types.ArrayType):
        _check_supported(data_type.elementType, column)
    elif isinstance(data_type, types.DecimalType) or not isinstance(
        data_type, types.NumericType | types.BooleanType | types.StringType
    ):
        raise ParamError(
            f"Output column {column.name!r} has the type {column.type!r}, but an output cannot be a "
            f"{data_type.simpleString()}. Use numbers, booleans, strings, or arrays and structs of them."
        )


def with_rows(prediction: Predicted, column: OutputColumn, rows: int) -> Predicted:
    """Return an output whose first dimension is the rows; a ``squeeze()`` in a model removes it if a batch has one row.

    Raises:
        ModelOutputError: the model returned one number for several rows.
    """
    if isinstance(prediction, Mapping):
        return {name: _with_rows(np.asarray(values), None, column, rows) for name, values in prediction.items()}
    return _with_rows(prediction, column.shape, column, rows)


def _with_rows(
    values: npt.NDArray[np.generic], shape: tuple[int, ...] | None, column: OutputColumn, rows: int
) -> npt.NDArray[np.generic]:
    if rows == 1 and values.shape == (shape or ()):
        return values[np.newaxis]
    if not values.ndim:
        raise ModelOutputError(
            f"Output column {column.name!r}: the model returned a single number for {counted(rows, 'row')}; the first "
            "dimension of an output must be the rows."
        )
    return values


def encode_output(prediction: Predicted, column: OutputColumn, arrow: pa.DataType) -> pa.Array:
    """Return the Arrow array of a column.

    Raises:
        ModelOutputError: the type cannot hold the shape or the values of the output; the message names both.
    """
    import pyarrow as pa  # noqa: PLC0415  (heavy)

    values = prediction.values() if isinstance(prediction, Mapping) else [prediction]
    if any(map(np.iscomplexobj, values)):
        raise ModelOutputError(
            f"Output column {column.name!r}: the model returned complex numbers, which Spark does not have. Return the "
            "real and the imaginary parts as separate values."
        )
    if isinstance(prediction, Mapping):
        return _encode_struct(prediction, column, arrow)
    if column.shape is not None and prediction.shape[1:] != column.shape:
        raise ModelOutputError(
            f"Output column {column.name!r}: the model returned rows of shape {list(prediction.shape[1:])}, but their "
            f"shape was {list(column.shape)} when the model was created. If prediction_fn changes the shape, set the "
            "type with setOutputTypes."
        )
    flat = flat_rows(prediction)
    if pa.types.is_struct(arrow):
        if flat.shape[1] != arrow.num_fields:
            raise _shape_error(prediction, column)
        parts = {arrow.field(index).name: flat[:, index] for index in range(arrow.num_fields)}
        return _encode_struct(parts, column, arrow)
    if column.best and flat.shape[1] > 1:
        # argmax treats NaN as the highest value, so a row with NaN gets no class.
        classes = np.where(np.isnan(flat).any(axis=1), np.nan, flat.argmax(axis=1))
        return _nested_arrays(classes, column, arrow)
    return _nested_arrays(flat if column.vector else prediction, column, arrow)


def _encode_struct(parts: Mapping[str, npt.NDArray[np.generic]], column: OutputColumn, arrow: pa.DataType) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415

    names = [arrow.field(index).name for index in range(arrow.num_fields)] if pa.types.is_struct(arrow) else []
    if set(names) != set(parts):
        raise ModelOutputError(
            f"Output column {column.name!r} has the type {column.type!r}, but prediction_fn returned the fields "
            f"{sorted(parts)}."
        )
    arrays = [_nested_arrays(np.asarray(parts[name]), column, arrow.field(name).type) for name in names]
    return pa.StructArray.from_arrays(arrays, fields=[arrow.field(name) for name in names])


def _nested_arrays(values: npt.NDArray[np.generic], column: OutputColumn, arrow: pa.DataType) -> pa.Array:
    """Return arrays nested as deeply as the type; the elements are one block of memory."""
    import pyarrow as pa  # noqa: PLC0415

    lists, element = [], arrow
    while pa.types.is_list(element):
        lists.append(element)
        element = element.value_type
    sizes = values.shape[: len(lists) + 1]
    if len(sizes) <= len(lists) or math.prod(values.shape) != math.prod(sizes):
        raise _shape_error(values, column)
    nested = _elements(values.reshape(-1), element, column)
    for level in range(len(lists), 0, -1):
        offsets = np.arange(math.prod(sizes[:level]) + 1, dtype=np.int32) * np.int32(sizes[level])
        nested = pa.ListArray.from_arrays(pa.array(offsets), nested, type=lists[level - 1])
    return nested


def _elements(values: npt.NDArray[Any], element: pa.DataType, column: OutputColumn) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415

    if not (pa.types.is_string(element) or pa.types.is_large_string(element)):
        try:
            return _numbers(values, element)
        except (TypeError, ValueError, OverflowError) as error:
            kinds = sorted({type(value).__name__ for value in values.tolist()})
            raise ModelOutputError(
                f"Output column {column.name!r} has the type {column.type!r}, but the model or prediction_fn returned "
                f"values of type {' and '.join(kinds)}. Return only numbers, with NaN for NULL, or set another type "
                "with setOutputTypes."
            ) from error
    texts = values.tolist()
    if any(isinstance(text, bytes) for text in texts):
        raise ModelOutputError(
            f"Output column {column.name!r} has the type {column.type!r}, but the model or prediction_fn returned "
            "bytes. Decode them in prediction_fn, for example with numpy.char.decode(values.astype(bytes), 'utf-8')."
        )
    return pa.array([None if text is None else str(text) for text in texts], element)


def _numbers(values: npt.NDArray[Any], element: pa.DataType) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415

    numpy_type = np.dtype(element.to_pandas_dtype())
    if numpy_type.kind not in "iub" or np.can_cast(values.dtype, numpy_type):
        return pa.array(np.ascontiguousarray(values, dtype=numpy_type), element)
    if values.dtype.kind == "f":
        values = np.rint(values.astype(np.float64))
    if numpy_type.kind == "b":
        values = np.maximum(values, 0)  # a cast would make negative numbers true
        fits = ~np.isnan(values)
    else:
        limits = np.iinfo(numpy_type)
        fits = (values >= float(limits.min)) & (values < float(limits.max) + 1.0)
    return pa.array(np.where(fits, values, 0).astype(numpy_type), element, mask=~fits)


def _shape_error(values: npt.NDArray[np.generic], column: OutputColumn) -> ModelOutputError:
    return ModelOutputError(
        f"Output column {column.name!r} has the type {column.type!r}, which cannot hold rows of shape "
        f"{list(values.shape[1:])}. Set another type with setOutputTypes."
    )
