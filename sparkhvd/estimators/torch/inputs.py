"""Mapping of feature columns to the inputs of a model.

The first rule that applies decides:

0. ``inputs`` is set: its columns, by the names of ``forward``'s arguments (``params.named_inputs``), which may also be
   names that ``forward`` collects in ``**``.
1. ``input_shapes`` is set: one input per feature column, reshaped to its shape; a leading -1 stands for the rows.
2. ``forward`` takes only keyword arguments: one input per column, by the column's name, with the column's own shape.
3. ``forward`` takes as many arguments as there are feature columns (and more than one): one input per column, in order,
   each with the column's own shape; a scalar column is ``(rows,)``.
4. ``forward`` takes one argument: a single array or vector column unchanged, or else all columns concatenated to
   ``(rows, k)``; a scalar column adds 1 to k.

A column in ``sparse_cols`` becomes a sparse tensor of shape ``(rows, size)`` and needs its own input.

Floating point and boolean columns are cast to the dtype of the model's parameters. So are integer columns, unless the
model has an embedding layer: then they stay int64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparkhvd._util.counts import counted
from sparkhvd.data.loaders.torch_data import sparse_tensor
from sparkhvd.data.schema.columns import flat_rows
from sparkhvd.data.schema.data_schema import ColumnSpec
from sparkhvd.errors import ParamError, SchemaError
from sparkhvd.estimators.params.named_inputs import NamedInput, ordered_inputs, refuse_input_shapes
from sparkhvd.estimators.params.shapes import check_input_shapes, row_shape


@dataclass(frozen=True)
class ModelInput:
    """One argument of ``forward``.

    Attributes:
        columns: the columns of the argument; several are concatenated.
        shape: shape of one row; None keeps the shape of the column.
        dtype: the type that the tensor is cast to.
        sparse_size: length of the rows of a sparse column; None for any other.
        keyword: the name by which the argument is passed; empty for a positional argument.
    """

    columns: tuple[str, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    sparse_size: int | None = None
    keyword: str = ""

    def tensor(self, arrays: Mapping[str, npt.NDArray[np.generic]], rows: int) -> torch.Tensor:
        """Return the input for these rows; a single column of the right dtype and shape is not copied."""
        if self.sparse_size is not None:
            return sparse_tensor(arrays[self.columns[0]], self.sparse_size, self.dtype)
        if len(self.columns) > 1:  # numpy concatenates many small columns four times as fast as torch
            columns = np.concatenate([flat_rows(arrays[name]) for name in self.columns], axis=1)
            joined = torch.from_numpy(columns).to(self.dtype)
            return joined if self.shape is None or -1 in self.shape else joined.reshape(rows, *self.shape)
        part = torch.from_numpy(arrays[self.columns[0]]).to(self.dtype)
        return part if self.shape is None else part.reshape(rows, *self.shape)

    def __str__(self) -> str:
        shape = "" if self.shape is None else f" as rows x {list(self.shape)}"
        return f"{' + '.join(self.columns)}{shape} ({str(self.dtype).removeprefix('torch.')})"


def plan_inputs(
    model: torch.nn.Module,
    columns: Sequence[ColumnSpec],
    input_shapes: Sequence[Sequence[int]] | None,
    named: Mapping[str, NamedInput] | None = None,
) -> tuple[ModelInput, ...]:
    """Return the inputs of ``model`` in the order of ``forward``'s arguments; ``named`` maps them by name.

    Raises:
        ParamError: ``input_shapes`` or the number of columns does not match; the message names both.
        SchemaError: columns of different kinds cannot be concatenated.
    """
    if named is not None:
        refuse_input_shapes(input_shapes)
        return _plan_named_inputs(model, columns, named)
    dtypes = {column.name: _dtype(model, column) for column in columns}
    sparse = [column.name for column in columns if column.sparse]
    if input_shapes is not None and sparse:
        raise ParamError(
            f"input_shapes cannot reshape the sparse column {sparse[0]!r}; leave input_shapes out, or remove the "
            "column from sparse_cols."
        )
    if input_shapes is not None:
        return _plan_reshaped_inputs(columns, input_shapes, dtypes)
    if _takes_only_keywords(model):
        return tuple(_own_input(column, dtypes[column.name]) for column in columns)
    minimum, maximum = _argument_counts(model)
    if len(columns) > 1 and minimum <= len(columns) <= maximum:
        return tuple(_own_input(column, dtypes[column.name]) for column in columns)
    if not minimum <= 1 <= maximum:
        names = [column.name for column in columns]
        accepted = counted(minimum, "input") if minimum == maximum else f"{minimum} to {maximum} inputs"
        raise ParamError(
            f"The model's forward takes {accepted}, but feature_cols has {counted(len(names), 'column')}: {names}. "
            "Pass one column per input, or let forward take one input, for which all columns are concatenated."
        )
    if len(columns) == 1 and columns[0].kind != "scalar":
        return (_own_input(columns[0], dtypes[columns[0].name]),)
    if sparse:
        raise SchemaError(
            f"The sparse column {sparse[0]!r} cannot be concatenated with other columns for the model's only input. "
            "Let forward take one argument per column, or remove the column from sparse_cols."
        )
    if len(set(dtypes.values())) > 1:
        raise SchemaError(
            f"The feature columns {[f'{name}: {str(dtype)[6:]}' for name, dtype in dtypes.items()]} cannot be "
            "concatenated for the model's only input: the model has an embedding layer, so integer columns stay "
            "integers. Cast them to one type, or let forward take one argument per column."
        )
    widths = [1 if column.kind == "scalar" else int(np.prod(column.shape or (-1,))) for column in columns]
    width = sum(widths) if min(widths) > 0 else -1
    return (ModelInput(tuple(dtypes), (width,), next(iter(dtypes.values()))),)


def called_in_order(model: torch.nn.Module, inputs: Sequence[ModelInput]) -> Callable[..., Any]:
    """Return a function that calls the model with the tensors of ``inputs``, in this order."""
    if not any(keywords := _keywords(model, inputs)):
        return model

    def call(*tensors: torch.Tensor) -> Any:
        positional, named = _arguments(keywords, tensors)
        return model(*positional, **named)

    return call


def _keywords(model: torch.nn.Module, inputs: Sequence[ModelInput]) -> list[str]:
    """Return the keyword of each input; empty for a positional one."""
    if _takes_only_keywords(model):
        return [part.keyword or part.columns[0] for part in inputs]
    return [part.keyword for part in inputs]


def _arguments(
    keywords: Sequence[str], tensors: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Divide the tensors of all inputs into positional arguments and those by keyword."""
    pairs = list(zip(keywords, tensors, strict=True))
    positional = tuple(tensor for keyword, tensor in pairs if not keyword)
    return positional, {keyword: tensor for keyword, tensor in pairs if keyword}


@contextmanager
def taking_inputs_in_order(model: torch.nn.Module, inputs: Sequence[ModelInput]) -> Iterator[None]:
    """Let the model itself take the tensors of ``inputs`` in this order within the block, even by keyword only."""
    if not any(names := _keywords(model, inputs)):
        yield
        return

    def named(
        _: torch.nn.Module, tensors: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional, by_name = _arguments(names, tensors) if tensors else ((), {})
        return positional, {**by_name, **keywords}

    hook = model.register_forward_pre_hook(named, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        hook.remove()


def _plan_named_inputs(
    model: torch.nn.Module, columns: Sequence[ColumnSpec], named: Mapping[str, NamedInput]
) -> tuple[ModelInput, ...]:
    positional = [argument.name for argument in _positional(model)]
    names, required = _named_arguments(model, named)
    inputs: list[ModelInput] = []
    for name, named_input, specs in ordered_inputs(named, names, required, columns):
        dtype = _dtype(model, specs[0]) if named_input.dtype is None else _tensor_dtype(name, named_input.dtype)
        follows = len(inputs) < len(positional) and positional[len(inputs)] == name
        keyword = "" if follows else name  # an earlier argument has its default, or this one is keyword-only
        if len(specs) == 1 and specs[0].sparse:
            inputs.append(replace(_own_input(specs[0], dtype), keyword=keyword))
            continue
        shape = named_input.shape if named_input.shape is not None or len(specs) == 1 else (-1,)
        inputs.append(ModelInput(named_input.columns, shape, dtype, keyword=keyword))
    return tuple(inputs)


def _named_arguments(model: torch.nn.Module, named: Mapping[str, NamedInput]) -> tuple[list[str], list[str]]:
    """Return the names of ``forward``'s arguments, and those of the arguments that it requires."""
    parameters = _parameters(model)
    arguments = [p for p in parameters if p.kind not in {p.VAR_POSITIONAL, p.VAR_KEYWORD}]
    names = [argument.name for argument in arguments]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        names += [name for name in named if name not in names]
    return names, [argument.name for argument in arguments if argument.default is argument.empty]


def _tensor_dtype(name: str, dtype: str) -> torch.dtype:
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ParamError(
            f"inputs[{name!r}] has dtype {dtype!r}, which PyTorch does not have; use the name of a torch dtype, such "
            "as 'float32'."
        )
    return torch_dtype


def _own_input(column: ColumnSpec, dtype: torch.dtype) -> ModelInput:
    # The size is unknown before the rows have been read; such a plan is used for checks only.
    size = (column.shape[0] if column.shape else 0) if column.sparse else None
    return ModelInput((column.name,), None, dtype, size)


def model_dtype(model: torch.nn.Module) -> torch.dtype:
    """Return the dtype of the model's first floating point parameter, or torch's default."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def _plan_reshaped_inputs(
    columns: Sequence[ColumnSpec], input_shapes: Sequence[Sequence[int]], dtypes: Mapping[str, torch.dtype]
) -> tuple[ModelInput, ...]:
    check_input_shapes(input_shapes, [column.name for column in columns])
    inputs = []
    for column, input_shape in zip(columns, input_shapes, strict=True):
        shape = row_shape(input_shape)
        if column.shape is not None and np.prod(shape, dtype=int) != np.prod(column.shape, dtype=int):
            raise ParamError(
                f"input_shapes has {list(input_shape)} for column {column.name!r}, but its rows have shape "
                f"{list(column.shape)}; both shapes must have the same number of elements."
            )
        inputs.append(ModelInput((column.name,), shape, dtypes[column.name]))
    return tuple(inputs)


def _dtype(model: torch.nn.Module, column: ColumnSpec) -> torch.dtype:
    if column.dtype.startswith("int") and any(map(_is_embedding, model.modules())):
        return torch.int64
    return model_dtype(model)


def _is_embedding(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):  # TorchScript keeps only the name of the class
        return module.original_name in {"Embedding", "EmbeddingBag"}
    return isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)


def _argument_counts(model: torch.nn.Module) -> tuple[int, float]:
    positional = _positional(model)
    minimum = sum(p.default is p.empty for p in positional)
    variadic = any(p.kind is p.VAR_POSITIONAL for p in _parameters(model))
    return minimum, float("inf") if variadic else len(positional)


def _takes_only_keywords(model: torch.nn.Module) -> bool:
    kinds = {parameter.kind for parameter in _parameters(model)}
    return bool(kinds) and kinds <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


def _positional(model: torch.nn.Module) -> list[inspect.Parameter]:
    return [p for p in _parameters(model) if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]


def _parameters(model: torch.nn.Module) -> list[inspect.Parameter]:
    """Return the arguments of ``forward``; for a scripted module, from its TorchScript schema."""
    model = getattr(model, "_orig_mod", model)  # the wrapper of torch.compile takes any arguments
    if not isinstance(model, torch.jit.ScriptModule):
        return list(inspect.signature(model.forward).parameters.values())
    forward: Any = model.forward
    arguments = forward.schema.arguments[1:]  # the first is the module itself
    kind, required = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    return [
        inspect.Parameter(a.name, kind, default=a.default_value if a.has_default_value() else required)
        for a in arguments
    ]
