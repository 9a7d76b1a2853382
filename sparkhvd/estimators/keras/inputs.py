"""The mapping of columns to the inputs and the targets of a Keras model.

The rules for inputs, in the order in which they are tried:

0. ``inputs`` is set: it defines the mapping, see ``sparkhvd.estimators.params.named_inputs``; a subclassed model gets a
   dict.
1. The model has as many inputs as there are feature columns: by name if all names are equal, else in order.
2. The model has one input (or is a subclass whose inputs are unknown): all feature columns are concatenated to
   ``(rows, k)``, with one element per scalar; a single array or vector column keeps its shape.

Each input is reshaped to the model's shape and cast to its dtype, or to ``input_shapes``. A label column goes to the
output of the same name if all names are equal, else to the outputs in order; it is reshaped to the output's shape if it
has as many elements. With TensorFlow, text columns go to string inputs, where preprocessing layers turn them into
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from sparkhvd._util.counts import counted
from sparkhvd.data.schema.columns import flat_rows
from sparkhvd.data.schema.data_schema import ColumnSpec
from sparkhvd.data.schema.spark_types import numbers_only
from sparkhvd.errors import ModelOutputError, ParamError
from sparkhvd.estimators.params.named_inputs import NamedInput, ordered_inputs, refuse_input_shapes
from sparkhvd.estimators.params.shapes import check_input_shapes, row_shape

if TYPE_CHECKING:
    import keras

Arrays = Mapping[str, npt.NDArray[np.generic]]
T = TypeVar("T")

TEXT = "string"  # the name of the dtype in Keras
_STRUCTURE_NAMES = {"single": "one output", "list": "a list of outputs", "dict": "a dict of outputs"}


@dataclass(frozen=True)
class Port:
    """One input or output of a model.

    Attributes:
        name: the model's name for it.
        columns: the columns that it consists of; several columns are concatenated.
        shape: shape of one row; None keeps the shape of the column.
        dtype: the dtype that values are cast to; None keeps the dtype of the column, but casts floating-point values to
            Keras' default (``keras.config.floatx()``), as ``model.fit`` does.
        sparse: length of the rows of a sparse column; None for any other column.
    """

    name: str
    columns: tuple[str, ...]
    shape: tuple[int, ...] | None
    dtype: str | None
    sparse: int | None = None

    def array(self, arrays: Arrays, rows: int) -> Any:
        """Return the values of these rows: an array, or a TensorFlow tensor if they are sparse or strings."""
        if self.sparse is not None:
            from sparkhvd.data.loaders.tf_data import sparse_tensor  # noqa: PLC0415  (imports TensorFlow)

            return sparse_tensor(arrays[self.columns[0]], self.sparse, self.dtype or "float32")
        parts = [arrays[name] for name in self.columns]
        joined = parts[0] if len(parts) == 1 else np.concatenate(list(map(flat_rows, parts)), axis=1)
        if self.dtype == TEXT:
            import tensorflow as tf  # noqa: PLC0415  (the only backend with string tensors)

            joined = tf.constant(joined, tf.string) if len(joined) else tf.zeros(joined.shape, tf.string)
            return joined if self.shape is None else tf.reshape(joined, (rows, *self.shape))
        if self.dtype is not None:
            joined = joined.astype(self.dtype, copy=False)
        elif joined.dtype.kind == "f":
            import keras  # noqa: PLC0415

            joined = joined.astype(keras.config.floatx(), copy=False)
        return joined if self.shape is None else joined.reshape(rows, *self.shape)

    def __str__(self) -> str:
        shape = "" if self.shape is None else f" as rows x {list(self.shape)}"
        return f"{self.name!r} is {' + '.join(self.columns)}{shape}"


@dataclass(frozen=True)
class Ports:
    """All inputs or all outputs of a model, in the structure that Keras expects.

    Attributes:
        ports: the inputs or outputs, in the model's order.
        structure: the container that holds them.
        order: for outputs, the indices into ``ports`` of the label columns, in their order; None if both orders are
            the same.
    """

    ports: tuple[Port, ...]
    structure: Literal["single", "list", "dict"]
    order: tuple[int, ...] | None = None

    def arrays(self, columns: Arrays, rows: int) -> Any:
        """Return the values of these rows in the structure that Keras expects."""
        values = [port.array(columns, rows) for port in self.ports]
        if 0 < sum(isinstance(value, np.ndarray) for value in values) < len(values):  # models do not accept a mixture
            import keras  # noqa: PLC0415

            values = [keras.ops.convert_to_tensor(v) if isinstance(v, np.ndarray) else v for v in values]
        return self.arranged(values)

    def arranged(self, values: Sequence[Any]) -> Any:
        """Return values, one per port, in the structure."""
        if self.structure == "single":
            return values[0]
        if self.structure == "list":
            return tuple(values)  # tf.data takes a list for a single tensor
        return {port.name: value for port, value in zip(self.ports, values, strict=True)}

    def flat(self, values: Any) -> list[Any]:
        """Return values, one per port, from the structure; the inverse of ``arranged``.

        Raises:
            ModelOutputError: a model without declared outputs returns another structure.
        """
        actual = "dict" if isinstance(values, dict) else "list" if isinstance(values, list | tuple) else "single"
        if actual == "single" and self.structure == "list" and len(self.ports) == 1:
            return [values]  # a loaded model returns a list of one output without the list
        if actual != self.structure:
            raise ModelOutputError(
                f"The model returns {_STRUCTURE_NAMES[actual]}, but {_STRUCTURE_NAMES[self.structure]} is expected for "
                f"{[port.name for port in self.ports]}. A subclassed model must return one output, or a list or tuple "
                "with one output per label column. Name the columns in label_cols, with from_model too."
            )
        if self.structure == "single":
            return [values]
        return [values[port.name] for port in self.ports] if self.structure == "dict" else list(values)

    def by_label(self, flat: Sequence[T]) -> list[T]:
        """Return values that are in the model's order in the order of the label columns."""
        return list(flat) if self.order is None else [flat[index] for index in self.order]

    def __str__(self) -> str:
        return ", ".join(map(str, self.ports))


def plan_inputs(
    model: keras.Model,
    columns: Sequence[ColumnSpec],
    shapes: Sequence[Sequence[int]] | None,
    named: Mapping[str, NamedInput] | None = None,
) -> Ports:
    """Return the inputs of ``model``. ``named`` maps columns by input name; a sparse column needs its own input.

    Raises:
        ParamError: the columns do not fit the inputs; the message names both.
        SchemaError: a column holds neither numbers nor text.
    """
    text_columns = {column.name for column in columns if column.dtype == "str"}
    for column in columns:
        if column.name not in text_columns:
            numbers_only(column)
    dense = _plan_dense(model, columns, shapes, named)
    sparse = {column.name: column for column in columns if column.sparse}
    ports = [_with_text(port, text_columns) for port in dense.ports]
    return replace(dense, ports=tuple(_with_sparse(port, sparse) if sparse else port for port in ports))


def _with_text(port: Port, text_columns: Set[str]) -> Port:
    texts = [name for name in port.columns if name in text_columns]
    if not texts:
        if port.dtype == TEXT:
            raise _text_error(port, port.columns[0])
        return port
    import keras  # noqa: PLC0415

    if keras.config.backend() != "tensorflow":
        raise ParamError(
            f"The column {texts[0]!r} holds text, but only Keras' TensorFlow backend has string tensors. Index the "
            "column first, for example with pyspark.ml.feature.StringIndexer."
        )
    if port.dtype == TEXT and len(texts) < len(port.columns):
        others = [name for name in port.columns if name not in text_columns]
        raise _text_error(port, others[0])
    if len(texts) < len(port.columns) or port.dtype not in {None, TEXT}:
        numbers = "numbers" if port.dtype in {None, TEXT} else port.dtype
        raise ParamError(
            f"The column {texts[0]!r} holds text, but the input {port.name!r} takes {numbers}. Add an input for the "
            'column to the model, keras.Input((1,), dtype="string"), with a StringLookup or TextVectorization after '
            "it; or index the column first, for example with pyspark.ml.feature.StringIndexer."
        )
    return replace(port, dtype=TEXT)


def _text_error(port: Port, column: str) -> ParamError:
    return ParamError(
        f"The input {port.name!r} takes strings, but the column {column!r} does not hold text. Cast the column "
        '(df.withColumn(..., column.cast("string"))), or change the dtype of the input.'
    )


def _with_sparse(port: Port, sparse: Mapping[str, ColumnSpec]) -> Port:
    names = [name for name in port.columns if name in sparse]
    if not names:
        return port
    import keras  # noqa: PLC0415

    if keras.config.backend() != "tensorflow":
        raise ParamError(
            f"The column {names[0]!r} is in sparse_cols, but only Keras' TensorFlow backend takes sparse tensors here. "
            "Remove it from sparse_cols."
        )
    if len(port.columns) > 1:
        raise ParamError(
            f"The sparse column {names[0]!r} cannot be concatenated with others for the input {port.name!r}. Use a "
            "model with one input per column, or remove the column from sparse_cols."
        )
    # The size is unknown until the data is read. Before that, only messages use the plan.
    (size,) = sparse[names[0]].shape or (0,)
    return replace(port, shape=None, sparse=size)


def _plan_dense(
    model: keras.Model,
    columns: Sequence[ColumnSpec],
    shapes: Sequence[Sequence[int]] | None,
    named: Mapping[str, NamedInput] | None,
) -> Ports:
    declared = _declared_tensors(model, "inputs")
    names = [column.name for column in columns]
    if named is not None:
        refuse_input_shapes(shapes)
        return _plan_named_inputs(model, declared, columns, named)
    if shapes is not None:
        check_input_shapes(shapes, names)
    row_shapes = None if shapes is None else {n: row_shape(shape) for n, shape in zip(names, shapes, strict=True)}
    if declared is None:
        if row_shapes is not None and len(columns) > 1:
            return Ports(tuple(Port(name, (name,), row_shapes[name], None) for name in names), "list")
        shape = row_shapes[names[0]] if row_shapes else _concatenated_shape(columns)
        return Ports((Port("input", tuple(names), shape, None),), "single")
    structure = _structure(getattr(model, "_inputs_struct", None), len(declared))
    if len(declared) == 1 and len(columns) > 1:
        ((input_name, tensor),) = declared.items()
        shape = _static_shape(tensor) or _concatenated_shape(columns)
        return Ports((Port(input_name, tuple(names), shape, tensor.dtype),), structure)
    if len(declared) != len(columns):
        raise ParamError(
            f"The model has {counted(len(declared), 'input')} {list(declared)}, but feature_cols has "
            f"{counted(len(columns), 'column')}: "
            f"{names}. Use one column per input, or a model with one input for all columns, concatenated."
        )
    by_name = set(declared) == set(names)
    ports = []
    for (input_name, tensor), column in zip(declared.items(), columns, strict=True):
        name = input_name if by_name else column.name
        shape = row_shapes[name] if row_shapes else _static_shape(tensor)
        ports.append(Port(input_name, (name,), shape, tensor.dtype))
    return Ports(tuple(ports), structure)


def _plan_named_inputs(
    model: keras.Model,
    declared: Mapping[str, keras.KerasTensor] | None,
    columns: Sequence[ColumnSpec],
    named: Mapping[str, NamedInput],
) -> Ports:
    if declared is None:  # a subclassed model without declared inputs
        entries = ordered_inputs(named, list(named), named, columns)
        ports = [Port(name, entry.columns, entry.shape, entry.dtype) for name, entry, _ in entries]
        return Ports(tuple(ports), "dict")
    entries = ordered_inputs(named, list(declared), declared, columns)
    ports = [
        Port(name, entry.columns, entry.shape or _static_shape(declared[name]), entry.dtype or declared[name].dtype)
        for name, entry, _ in entries
    ]
    return Ports(tuple(ports), _structure(getattr(model, "_inputs_struct", None), len(declared)))


def plan_outputs(model: keras.Model, labels: Sequence[ColumnSpec], shapes: Sequence[Sequence[int]] | None) -> Ports:
    """Return the targets of ``model``, one per label column.

    Raises:
        ParamError: the numbers of outputs and labels, or of shapes and labels, differ.
        SchemaError: a label does not hold numbers.
    """
    for column in labels:
        numbers_only(column)
    declared = _declared_tensors(model, "outputs")
    names = [column.name for column in labels]
    if shapes is not None and len(shapes) != len(labels):
        raise ParamError(
            f"label_shapes has {counted(len(shapes), 'shape')}, but label_cols has "
            f"{counted(len(labels), 'column')}: {names}. Pass one shape per label column."
        )
    row_shapes = [None] * len(labels) if shapes is None else [row_shape(shape) for shape in shapes]
    if declared is None:
        ports = [Port(name, (name,), shape, None) for name, shape in zip(names, row_shapes, strict=True)]
        return Ports(tuple(ports), "single" if len(ports) == 1 else "list")
    outputs = list(declared)
    if len(outputs) != len(labels):
        raise ParamError(
            f"The model has {counted(len(outputs), 'output')} {outputs}, but label_cols has {len(labels)}: {names}. "
            "Each output needs its label column, in the same order or under the output's name."
        )
    by_name = set(outputs) == set(names)
    specs = {column.name: column for column in labels}
    ports = []
    for index, (output, tensor) in enumerate(declared.items()):
        column = specs[output] if by_name else labels[index]
        shape = row_shapes[names.index(column.name)]
        ports.append(Port(output, (column.name,), shape if shape is not None else _output_shape(column, tensor), None))
    order = tuple(map(outputs.index, names)) if by_name else None
    return Ports(tuple(ports), _structure(getattr(model, "_outputs_struct", None), len(declared)), order)


def own_outputs(model: keras.Model) -> Ports:
    """Return the outputs of a model without labels; a single output if the model does not declare them."""
    declared = _declared_tensors(model, "outputs")
    if declared is None:
        return Ports((Port("output", (), None, None),), "single")
    structure = _structure(getattr(model, "_outputs_struct", None), len(declared))
    return Ports(tuple(Port(name, (), None, None) for name in declared), structure)


def _declared_tensors(model: keras.Model, side: Literal["inputs", "outputs"]) -> dict[str, keras.KerasTensor] | None:
    """Return the input or output tensors of a model by their names, in Keras' order; None if it declares none.

    For a model that takes or returns a dict, the names are its keys, in sorted order. Otherwise they are the names that
    Keras gives the tensors.
    """
    tensors = getattr(model, side, None)
    if not tensors:
        return None
    structure = getattr(model, f"_{side}_struct", None)
    if isinstance(structure, dict) and len(structure) == len(tensors):
        return {key: structure[key] for key in sorted(structure)}
    names = getattr(model, "output_names", None) if side == "outputs" else None
    return dict(zip(names or [tensor.name for tensor in tensors], tensors, strict=True))


def _structure(container: object, count: int) -> Literal["single", "list", "dict"]:
    if isinstance(container, dict):
        return "dict"
    return "list" if count > 1 or isinstance(container, list | tuple) else "single"


def _static_shape(tensor: keras.KerasTensor) -> tuple[int, ...] | None:
    """Return the shape of one row if the model fixes all its dimensions, else None."""
    sizes = tuple(tensor.shape[1:])
    return None if any(size is None for size in sizes) else sizes


def _concatenated_shape(columns: Sequence[ColumnSpec]) -> tuple[int, ...] | None:
    if len(columns) == 1:
        return None if columns[0].kind != "scalar" else (1,)
    widths = [1 if column.kind == "scalar" else int(np.prod(column.shape or (-1,))) for column in columns]
    return (sum(widths) if min(widths) > 0 else -1,)


def _output_shape(column: ColumnSpec, tensor: keras.KerasTensor) -> tuple[int, ...] | None:
    """Return the shape of one row of the output if the label has as many elements, else None."""
    shape = _static_shape(tensor)
    fits = shape is not None and column.shape is not None and np.prod(shape) == np.prod(column.shape)
    return shape if fits else None
