"""The parameter ``inputs``: which columns make which input of a model, by the model's own names.

::

    inputs={
        "user": "user_id",                                                       # one column
        "measured": ["height", "width"],                                         # several, side by side
        "picture": {"columns": "pixels", "shape": [1, 8, 8], "dtype": "float32"},
    }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparkhvd.data.schema.data_schema import ColumnSpec
from sparkhvd.errors import ParamError

_KEYS = ("columns", "shape", "dtype")


@dataclass(frozen=True)
class NamedInput:
    """What makes one input.

    Attributes:
        columns: one, or several that go side by side.
        shape: shape of one row; None leaves it to the model and the columns.
        dtype: numpy name of its type; None leaves it to the model.
    """

    columns: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


def named_inputs(name: str, value: Any) -> dict[str, NamedInput]:
    """The converter of the parameter."""
    if not isinstance(value, Mapping) or not value:
        raise ParamError(
            f"{name}={value!r} must be a dict from the model's inputs to columns, such as {{'image': 'pixels'}}."
        )
    return {str(key): _one(f"{name}[{key!r}]", item) for key, item in value.items()}


def columns_of(inputs: Mapping[str, NamedInput]) -> tuple[str, ...]:
    """All columns that are named, each once."""
    return tuple(dict.fromkeys(column for each in inputs.values() for column in each.columns))


def ordered_inputs(
    inputs: Mapping[str, NamedInput], names: Sequence[str], needed: int, columns: Sequence[ColumnSpec]
) -> list[tuple[str, NamedInput, list[ColumnSpec]]]:
    """The inputs in the order of the model's own, each with its columns; of a struct, with all of its fields.

    Args:
        inputs: what was given.
        names: the model's inputs, in their order.
        needed: how many of them, from the first, the model cannot do without.
        columns: the feature columns.

    Raises:
        ParamError: a name is none of the model's, an input gets nothing, or a column is not a feature.
    """
    unknown = [name for name in inputs if name not in names]
    if unknown:
        raise ParamError(f"inputs names {unknown[0]!r}, which is not an input of the model: {list(names)}.")
    used = [name for name in names if name in inputs]
    missing = [name for place, name in enumerate(names) if name not in inputs and place < max(needed, len(used))]
    if missing:
        raise ParamError(
            f"inputs has no column for the model's input {missing[0]!r}. Add one; the model's inputs are {list(names)}."
        )
    found = [(name, _specs(inputs[name].columns, columns)) for name in used]
    return [
        (name, replace(inputs[name], columns=tuple(column.name for column in specs)), specs) for name, specs in found
    ]


def _specs(names: Sequence[str], columns: Sequence[ColumnSpec]) -> list[ColumnSpec]:
    """The feature columns of these names; of a struct, all of its fields."""
    by_name = {column.name: column for column in columns}
    found: list[ColumnSpec] = []
    for name in names:
        fields = [column for column in columns if column.name.startswith(f"{name}.")] if name not in by_name else []
        if name not in by_name and not fields:
            raise ParamError(f"inputs names the column {name!r}, which is not a feature column: {list(by_name)}.")
        found += fields or [by_name[name]]
    return found


def refuse_input_shapes(input_shapes: Sequence[Sequence[int]] | None) -> None:
    """Refuse a second way to say how the inputs are shaped.

    Raises:
        ParamError: it is given.
    """
    if input_shapes is not None:
        raise ParamError(
            "input_shapes cannot be combined with inputs, which sets the shape of each input, as in {'image': "
            "{'columns': 'pixels', 'shape': [28, 28]}}. Leave input_shapes out."
        )


def _one(what: str, value: Any) -> NamedInput:
    if isinstance(value, NamedInput):
        return value
    given = value if isinstance(value, Mapping) else {"columns": value}
    columns = given.get("columns")
    columns = (columns,) if isinstance(columns, str) else columns
    if set(given) - set(_KEYS) or not columns or not all(isinstance(column, str) for column in columns):
        raise ParamError(f"{what}={value!r} must be a column, a list of columns, or a dict with {', '.join(_KEYS)}.")
    try:
        shape = None if given.get("shape") is None else tuple(int(size) for size in given["shape"])
        dtype = None if given.get("dtype") is None else _dtype_name(given["dtype"])
    except (TypeError, ValueError) as error:
        raise ParamError(
            f"{what}={value!r} has an invalid shape or dtype ({error}). shape must be a list of sizes, and dtype a "
            "name such as 'int64'."
        ) from error
    shape = shape[1:] if shape and shape[0] == -1 else shape
    return NamedInput(tuple(columns), shape, dtype)


def _dtype_name(dtype: Any) -> str:
    """As frameworks write it: strings are ``"string"``."""
    return "string" if dtype in {"string", "str", str} else str(np.dtype(dtype).name)
