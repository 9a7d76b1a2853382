"""How columns become the inputs and the targets of a Keras model.

Inputs, in the order in which the rules are tried:

0. ``inputs`` given: what it says, see ``sparkhvd.estimators.params.named_inputs``; a subclassed model gets a dict.
1. The model has as many inputs as there are feature columns: by name where the names are the same, else in order.
2. The model has one input (or is a subclass whose inputs are not known): all feature columns side by side as
   ``(rows, k)``, scalars counting one; a single array or vector column as it is.

Each input is reshaped to the model's shape and cast to its dtype, or to ``input_shapes``. A label column goes to the
output of its name where all names are the same, else in order; it is reshaped to the output's shape when it has as many
elements. Texts go, on TensorFlow, to inputs of strings, in which preprocessing layers make numbers of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from sparkhvd.data.schema.data_schema import ColumnSpec
from sparkhvd.data.schema.spark_types import numbers_only
from sparkhvd.errors import ModelOutputError, ParamError
from sparkhvd.estimators.params.named_inputs import NamedInput, ordered_inputs, refuse_input_shapes
from sparkhvd.estimators.params.shapes import check_input_shapes, row_shape

Arrays = Mapping[str, npt.NDArray[np.generic]]
T = TypeVar("T")

TEXT = "string"  # as Keras calls the dtype
_OUTPUTS = {"single": "one output", "list": "a list of outputs", "dict": "a dict of outputs"}


@dataclass(frozen=True)
class Port:
    """One input or output of a model.

    Attributes:
        name: the model's name for it.
        columns: the columns that it is made of; several are put side by side.
        shape: shape of one row; None keeps the column's own.
        dtype: what the values are cast to; None keeps the column's own, but casts floating-point values to Keras'
            default (``keras.config.floatx()``), as ``model.fit`` does.
        sparse: length of the rows of a sparse column; None for any other.
    """

    name: str
    columns: tuple[str, ...]
    shape: tuple[int, ...] | None
    dtype: str | None
    sparse: int | None = None

    def array(self, arrays: Arrays, rows: int) -> Any:
        """The values for these rows: an array, or TensorFlow's tensor where they are sparse or strings."""
        if self.sparse is not None:
            from sparkhvd.data.loaders.tf_data import sparse_tensor  # noqa: PLC0415  (imports TensorFlow)

            return sparse_tensor(arrays[self.columns[0]], self.sparse, self.dtype or "float32")
        parts = [arrays[name] for name in self.columns]
        joined = parts[0] if len(parts) == 1 else np.concatenate([part.reshape(rows, -1) for part in parts], axis=1)
        if self.dtype == TEXT:
            import tensorflow as tf  # noqa: PLC0415  (the only backend that has strings)

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
    """All inputs of a model, or all its outputs, in the structure that Keras wants them in.

    Attributes:
        ports: in the model's order.
        structure: what holds them.
        order: of outputs, the places in ``ports`` of the label columns, one after the other; None where all are in
            the same order.
    """

    ports: tuple[Port, ...]
    structure: Literal["single", "list", "dict"]
    order: tuple[int, ...] | None = None

    def arrays(self, columns: Arrays, rows: int) -> Any:
        """What is passed to Keras for these rows."""
        values = [port.array(columns, rows) for port in self.ports]
        if 0 < sum(isinstance(value, np.ndarray) for value in values) < len(values):  # a model takes no mixture
            import keras  # noqa: PLC0415

            values = [keras.ops.convert_to_tensor(v) if isinstance(v, np.ndarray) else v for v in values]
        return self.arranged(values)

    def arranged(self, values: Sequence[Any]) -> Any:
        """Values, one per port, in the structure."""
        if self.structure == "single":
            return values[0]
        if self.structure == "list":
            return tuple(values)  # in which, unlike in a list, tf.data sees several tensors
        return {port.name: value for port, value in zip(self.ports, values, strict=True)}

    def flat(self, values: Any) -> list[Any]:
        """The inverse of ``arranged``.

        Raises:
            ModelOutputError: a model that does not tell its outputs gives others.
        """
        given = "dict" if isinstance(values, dict) else "list" if isinstance(values, list | tuple) else "single"
        if given != self.structure:
            raise ModelOutputError(
                f"The model gives {_OUTPUTS[given]} where {_OUTPUTS[self.structure]} is expected, for "
                f"{[port.name for port in self.ports]}. A subclassed model gives one output, or a list or tuple with "
                "one per label column; name them in label_cols, with from_model too."
            )
        if self.structure == "single":
            return [values]
        return [values[port.name] for port in self.ports] if self.structure == "dict" else list(values)

    def by_label(self, flat: Sequence[T]) -> list[T]:
        """What is in the model's order, in that of the label columns."""
        return list(flat) if self.order is None else [flat[place] for place in self.order]

    def __str__(self) -> str:
        return ", ".join(map(str, self.ports))


def plan_inputs(
    model: Any,
    columns: Sequence[ColumnSpec],
    shapes: Sequence[Sequence[int]] | None,
    named: Mapping[str, NamedInput] | None = None,
) -> Ports:
    """The inputs of ``model``; ``named`` says them by their names, and a sparse column needs one of its own.

    Raises:
        ParamError: the columns do not fit the inputs; the message names both.
        SchemaError: a column is neither numbers nor a text.
    """
    texts = {column.name for column in columns if column.dtype == "str"}
    for column in columns:
        if column.name not in texts:
            numbers_only(column)
    found = _plan_dense(model, columns, shapes, named)
    sparse = {column.name: column for column in columns if column.sparse}
    ports = [_of_texts(port, texts) for port in found.ports]
    return replace(found, ports=tuple(_sparse(port, sparse) if sparse else port for port in ports))


def _of_texts(port: Port, texts: Set[str]) -> Port:
    words = [name for name in port.columns if name in texts]
    if not words:
        if port.dtype == TEXT:
            raise _no_text(port, port.columns[0])
        return port
    import keras  # noqa: PLC0415

    if keras.config.backend() != "tensorflow":
        raise ParamError(
            f"The column {words[0]!r} is a text; of Keras' backends only TensorFlow has tensors of strings. Index it "
            "first, for example with pyspark.ml.feature.StringIndexer."
        )
    if port.dtype == TEXT and len(words) < len(port.columns):
        others = [name for name in port.columns if name not in texts]
        raise _no_text(port, others[0])
    if len(words) < len(port.columns) or port.dtype not in {None, TEXT}:
        numbers = "numbers" if port.dtype in {None, TEXT} else port.dtype
        raise ParamError(
            f"The column {words[0]!r} is a text, but the input {port.name!r} takes {numbers}. Give the model an input "
            'of its own for it, keras.Input((1,), dtype="string"), before a StringLookup or TextVectorization; or '
            "index it first, for example with pyspark.ml.feature.StringIndexer."
        )
    return replace(port, dtype=TEXT)


def _no_text(port: Port, column: str) -> ParamError:
    return ParamError(
        f"The input {port.name!r} takes strings, but the column {column!r} is none. Cast it "
        '(df.withColumn(..., column.cast("string"))), or give the input another dtype.'
    )


def _sparse(port: Port, sparse: Mapping[str, ColumnSpec]) -> Port:
    wanted = [name for name in port.columns if name in sparse]
    if not wanted:
        return port
    import keras  # noqa: PLC0415

    if keras.config.backend() != "tensorflow":
        raise ParamError(
            f"The column {wanted[0]!r} is in sparse_cols; of Keras' backends only TensorFlow takes sparse tensors here."
        )
    if len(port.columns) > 1:
        raise ParamError(
            f"The sparse column {wanted[0]!r} cannot go side by side with others into the input {port.name!r}. Give "
            "the model one input per column, or leave the column out of sparse_cols."
        )
    # Before the data have been seen the size is not known; what is planned then is only looked at.
    (size,) = sparse[wanted[0]].shape or (0,)
    return replace(port, shape=None, sparse=size)


def _plan_dense(
    model: Any,
    columns: Sequence[ColumnSpec],
    shapes: Sequence[Sequence[int]] | None,
    named: Mapping[str, NamedInput] | None,
) -> Ports:
    known = _ends(model, "inputs")
    names = [column.name for column in columns]
    if named is not None:
        refuse_input_shapes(shapes)
        return _by_name(model, known, columns, named)
    if shapes is not None:
        check_input_shapes(shapes, names)
    given = None if shapes is None else {name: row_shape(shape) for name, shape in zip(names, shapes, strict=True)}
    if known is None:
        if given is not None and len(columns) > 1:
            return Ports(tuple(Port(name, (name,), given[name], None) for name in names), "list")
        return Ports(
            (Port("input", tuple(names), given[names[0]] if given else _side_by_side(columns), None),), "single"
        )
    structure = _structure(getattr(model, "_inputs_struct", None), len(known))
    if len(known) == 1 and len(columns) > 1:
        ((known_as, tensor),) = known.items()
        shape = _static(tensor) or _side_by_side(columns)
        return Ports((Port(known_as, tuple(names), shape, tensor.dtype),), structure)
    if len(known) != len(columns):
        raise ParamError(
            f"The model has {len(known)} inputs {list(known)} but feature_cols has {len(columns)} columns: "
            f"{names}. Give one column per input, or one input to which all columns go side by side."
        )
    by_name = set(known) == set(names)
    ports = []
    for (known_as, tensor), column in zip(known.items(), columns, strict=True):
        name = known_as if by_name else column.name
        shape = given[name] if given else _static(tensor)
        ports.append(Port(known_as, (name,), shape, tensor.dtype))
    return Ports(tuple(ports), structure)


def _by_name(
    model: Any, known: Mapping[str, Any] | None, columns: Sequence[ColumnSpec], named: Mapping[str, NamedInput]
) -> Ports:
    if known is None:  # a subclass, which takes what it is given
        found = ordered_inputs(named, list(named), len(named), columns)
        ports = [Port(name, given.columns, given.shape, given.dtype) for name, given, _ in found]
        return Ports(tuple(ports), "dict")
    found = ordered_inputs(named, list(known), len(known), columns)
    ports = [
        Port(name, given.columns, given.shape or _static(known[name]), given.dtype or known[name].dtype)
        for name, given, _ in found
    ]
    return Ports(tuple(ports), _structure(getattr(model, "_inputs_struct", None), len(known)))


def plan_outputs(model: Any, labels: Sequence[ColumnSpec], shapes: Sequence[Sequence[int]] | None) -> Ports:
    """The targets of ``model``, one per label column.

    Raises:
        ParamError: there are not as many outputs as labels, or shapes as labels.
        SchemaError: a label is no number.
    """
    for column in labels:
        numbers_only(column)
    known = _ends(model, "outputs")
    names = [column.name for column in labels]
    if shapes is not None and len(shapes) != len(labels):
        raise ParamError(f"label_shapes has {len(shapes)} shapes but label_cols has {len(labels)} columns: {names}.")
    rows = [None] * len(labels) if shapes is None else [row_shape(shape) for shape in shapes]
    if known is None:
        ports = [Port(name, (name,), shape, None) for name, shape in zip(names, rows, strict=True)]
        return Ports(tuple(ports), "single" if len(ports) == 1 else "list")
    outputs = list(known)
    if len(outputs) != len(labels):
        raise ParamError(
            f"The model has {len(outputs)} output(s) {outputs} but label_cols has {len(labels)}: {names}. Each output "
            "needs its label column, in the same order or under the output's name."
        )
    by_name = set(outputs) == set(names)
    specs = {column.name: column for column in labels}
    ports = []
    for index, (output, tensor) in enumerate(known.items()):
        column = specs[output] if by_name else labels[index]
        shape = rows[names.index(column.name)]
        ports.append(Port(output, (column.name,), shape if shape is not None else _fitting(column, tensor), None))
    order = tuple(map(outputs.index, names)) if by_name else None
    return Ports(tuple(ports), _structure(getattr(model, "_outputs_struct", None), len(known)), order)


def own_outputs(model: Any) -> Ports:
    """The outputs of a model that nothing is learned with; one, if the model does not tell."""
    known = _ends(model, "outputs")
    if known is None:
        return Ports((Port("output", (), None, None),), "single")
    structure = _structure(getattr(model, "_outputs_struct", None), len(known))
    return Ports(tuple(Port(name, (), None, None) for name in known), structure)


def _ends(model: Any, which: Literal["inputs", "outputs"]) -> dict[str, Any] | None:
    """The tensors at an end of a model by the names that callers know, in Keras' order; None if it does not tell.

    Keras calls an end by its layer, but whoever passes or gets a dict by the key in it, in the order of the keys.
    """
    found = getattr(model, which, None)
    if not found:
        return None
    structure = getattr(model, f"_{which}_struct", None)
    if isinstance(structure, dict) and len(structure) == len(found):
        return {key: structure[key] for key in sorted(structure)}
    names = getattr(model, "output_names", None) if which == "outputs" else None
    return dict(zip(names or [tensor.name for tensor in found], found, strict=True))


def _structure(given: Any, count: int) -> Literal["single", "list", "dict"]:
    if isinstance(given, dict):
        return "dict"
    return "list" if count > 1 or isinstance(given, list | tuple) else "single"


def _static(tensor: Any) -> tuple[int, ...] | None:
    """The shape of one row, where the model fixes all of it."""
    sizes = tuple(tensor.shape[1:])
    return None if any(size is None for size in sizes) else sizes


def _side_by_side(columns: Sequence[ColumnSpec]) -> tuple[int, ...] | None:
    if len(columns) == 1:
        return None if columns[0].kind != "scalar" else (1,)
    widths = [1 if column.kind == "scalar" else int(np.prod(column.shape or (-1,))) for column in columns]
    return (sum(widths) if min(widths) > 0 else -1,)


def _fitting(column: ColumnSpec, tensor: Any) -> tuple[int, ...] | None:
    """The output's shape, for a label of as many elements."""
    shape = _static(tensor)
    fits = shape is not None and column.shape is not None and np.prod(shape) == np.prod(column.shape)
    return shape if fits else None
