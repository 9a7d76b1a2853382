"""The parameter ``inputs``: the columns for each input of a model, by the name of the input.

::

    inputs={
        "user": "user_id",                                                       # one column
        "measured": ["height", "width"],                                         # several, concatenated
        "picture": {"columns": "pixels", "shape": [1, 8, 8], "dtype": "float32"},
    }
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkhvd._util.suggestions import did_you_mean
from sparkhvd.data.schema.data_schema import ColumnSpec
from sparkhvd.errors import ParamError

_KEYS = ("columns", "shape", "dtype")


@dataclass(frozen=True)
class NamedInput:
    """The columns for one input of a model.

    Attributes:
        columns: one column, or several to concatenate.
        shape: the shape of one row; None derives it from the model and the columns.
        dtype: NumPy's name of the type; None derives it from the model.
    """

    columns: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


def named_inputs(name: str, value: object) -> dict[str, NamedInput]:
    """Convert a value of the parameter ``inputs``."""
    if not isinstance(value, Mapping) or not value:
        raise ParamError(
            f"{name}={value!r} must be a dict from the model's input names to columns, such as {{'image': 'pixels'}}."
        )
    return {str(key): _parsed_input(f"{name}[{key!r}]", item) for key, item in value.items()}


def columns_of(inputs: Mapping[str, NamedInput]) -> tuple[str, ...]:
    """Return all columns of the inputs, without duplicates."""
    return tuple(dict.fromkeys(column for named in inputs.values() for column in named.columns))


def ordered_inputs(
    inputs: Mapping[str, NamedInput], names: Sequence[str], required: Collection[str], columns: Sequence[ColumnSpec]
) -> list[tuple[str, NamedInput, list[ColumnSpec]]]:
    """Return the inputs in the model's order, with their columns; a struct column stands for all of its fields.

    Args:
        inputs: the parameter.
        names: the names of the model's inputs, in the model's order.
        required: the names of the inputs that the model requires.
        columns: the feature columns.

    Raises:
        ParamError: a name is not an input of the model, an input has no column, or a column is not a feature.
    """
    unknown = [name for name in inputs if name not in names]
    if unknown:
        hint = f" {did_you_mean(unknown[0], names)}".rstrip()
        raise ParamError(f"inputs has the key {unknown[0]!r}, but the model's inputs are {list(names)}.{hint}")
    used = [name for name in names if name in inputs]
    missing = [name for name in names if name in required and name not in inputs]
    if missing:
        raise ParamError(
            f"inputs has no column for the model's input {missing[0]!r}. Add one; the model's inputs are {list(names)}."
        )
    resolved = [(name, _specs(inputs[name].columns, columns)) for name in used]
    return [
        (name, replace(inputs[name], columns=tuple(column.name for column in specs)), specs) for name, specs in resolved
    ]


def _specs(names: Sequence[str], columns: Sequence[ColumnSpec]) -> list[ColumnSpec]:
    """Return the feature columns with these names; the name of a struct stands for all of its fields."""
    by_name = {column.name: column for column in columns}
    specs: list[ColumnSpec] = []
    for name in names:
        fields = [column for column in columns if column.name.startswith(f"{name}.")] if name not in by_name else []
        if name not in by_name and not fields:
            raise ParamError(f"inputs uses the column {name!r}, but the feature columns are {list(by_name)}.")
        specs += fields or [by_name[name]]
    return specs


def refuse_input_shapes(input_shapes: Sequence[Sequence[int]] | None) -> None:
    """Refuse ``input_shapes``, which cannot be combined with ``inputs``.

    Raises:
        ParamError: ``input_shapes`` is set.
    """
    if input_shapes is not None:
        raise ParamError(
            "input_shapes cannot be combined with inputs, which sets the shape of each input, as in {'image': "
            "{'columns': 'pixels', 'shape': [28, 28]}}. Leave input_shapes out."
        )


def _parsed_input(key: str, value: Any) -> NamedInput:
    if isinstance(value, NamedInput):
        return value
    fields = value if isinstance(value, Mapping) else {"columns": value}
    columns = fields.get("columns")
    columns = (columns,) if isinstance(columns, str) else columns
    if set(fields) - set(_KEYS) or not columns or not all(isinstance(column, str) for column in columns):
        raise ParamError(f"{key}={value!r} must be a column, a list of columns, or a dict with {', '.join(_KEYS)}.")
    try:
        shape = None if fields.get("shape") is None else tuple(int(size) for size in fields["shape"])
        dtype = None if fields.get("dtype") is None else _dtype_name(fields["dtype"])
    except (TypeError, ValueError) as error:
        raise ParamError(
            f"{key}={value!r} has an invalid shape or dtype ({error}). shape must be a list of sizes, and dtype a "
            "name such as 'int64'."
        ) from error
    shape = shape[1:] if shape and shape[0] == -1 else shape
    return NamedInput(tuple(columns), shape, dtype)


def _dtype_name(dtype: npt.DTypeLike) -> str:
    """Return the frameworks' name of a type; ``"string"`` for any string type."""
    return "string" if dtype in {"string", "str", str} else str(np.dtype(dtype).name)
