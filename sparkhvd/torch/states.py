"""Broadcast of parameters and optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkhvd.comm import session
from sparkhvd.comm.collectives.options import SubmitOptions
from sparkhvd.comm.interface import broadcast_object
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError
from sparkhvd.torch.ops.calls import Call, every
from sparkhvd.torch.ops.movements import Broadcast


def broadcast_parameters(
    params: Mapping[str, object] | Iterable[tuple[str, torch.Tensor] | torch.Tensor],
    root_rank: int = 0,
    process_set: ProcessSet | None = None,
) -> None:
    """Overwrite parameters and buffers with those of ``root_rank``, in place; sparse tensors are sent as objects.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``, with the same names or
            in the same order on all ranks.
        root_rank: the rank whose values are sent.
        process_set: the ranks that take part, all by default.

    Raises:
        ConfigError: an entry is not a tensor; the message names it.
    """
    pairs: list[tuple[str, torch.Tensor]] = []
    for index, entry in enumerate(params.items() if isinstance(params, Mapping) else params):
        pair = (str(index), entry) if isinstance(entry, torch.Tensor) else entry
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[1], torch.Tensor):
            raise ConfigError(
                f"broadcast_parameters() takes tensors only, got {_description(pair)}. Pass a state_dict() of tensors, "
                "or parameters; send other objects with broadcast_object()."
            )
        pairs.append((pair[0], pair[1]))
    named = [(f"broadcast_parameters.{name}", tensor) for name, tensor in pairs]
    _overwrite([pair for pair in named if pair[1].layout is torch.strided], root_rank, process_set)
    for name, tensor in named:
        if tensor.layout is not torch.strided:
            received = broadcast_object(tensor.detach().cpu(), root_rank, name, process_set)
            with torch.no_grad():
                tensor.copy_(received)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, process_set: ProcessSet | None = None
) -> None:
    """Overwrite the state and the options of an optimizer with those of ``root_rank``.

    Works for every optimizer with a ``state_dict``, even if only the root has taken steps.

    Args:
        optimizer: has the same parameters, in the same groups, on all ranks.
        root_rank: the rank whose optimizer state is sent.
        process_set: the ranks that take part, all by default.

    Raises:
        ValueError: the parameter groups of this rank's optimizer differ from those of the root.
    """
    is_root = session.current().world.rank == root_rank
    content = optimizer.state_dict() if is_root else None
    content = broadcast_nested(content, root_rank, "broadcast_optimizer_state", process_set)
    if not is_root:
        load_optimizer_state(optimizer, content)


def broadcast_nested(value: Any, root_rank: int, name: str, process_set: ProcessSet | None = None) -> Any:
    """Return the value of ``root_rank``: tensors, also in dicts, lists and tuples, and other objects; collective.

    Other ranks than the root receive tensors in the memory of the CPU.
    """
    is_root = session.current().world.rank == root_rank
    own: list[torch.Tensor] = []
    outline = broadcast_object(_outline(value, own) if is_root else None, root_rank, f"{name}.outline", process_set)
    tensors = own if is_root else [torch.empty(slot.shape, dtype=slot.dtype) for slot in _slots(outline)]
    _overwrite([(f"{name}.{index}", tensor) for index, tensor in enumerate(tensors)], root_rank, process_set)
    return value if is_root else _filled(outline, tensors)


def load_optimizer_state(optimizer: torch.optim.Optimizer, content: dict[str, Any]) -> None:
    """Load a ``state_dict()`` and keep its dtypes; ``load_state_dict`` converts them to those of the parameters."""
    optimizer.load_state_dict(content)
    return_dtypes(optimizer, content)


def return_dtypes(optimizer: torch.optim.Optimizer, content: Mapping[str, Any]) -> None:
    """Restore the dtypes of ``content`` in the state of an optimizer that has just loaded it."""
    numbers = [number for group in content["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        state = optimizer.state.get(parameter, {})
        for name, value in content["state"].get(number, {}).items():
            if name in state:
                state[name] = _with_dtypes(state[name], value)


def _with_dtypes(loaded: Any, value: Any) -> Any:
    """Return ``loaded`` with each tensor that has lost its dtype replaced by its counterpart in ``value``."""
    if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype is value.dtype else value.to(loaded.device)
    if isinstance(value, dict) and isinstance(loaded, dict):
        return {key: _with_dtypes(entry, value.get(key)) for key, entry in loaded.items()}
    if type(value) in {list, tuple} and type(loaded) is type(value) and len(loaded) == len(value):
        return type(value)(_with_dtypes(*pair) for pair in zip(loaded, value, strict=True))
    return loaded


def _overwrite(named: Sequence[tuple[str, torch.Tensor]], root: int, process_set: ProcessSet | None) -> None:
    """Broadcast tensors of any strides and dtypes in place, all at once."""
    calls = [
        Call(Broadcast(tensor, root, SubmitOptions(name, process_set), any_memory=True), every)
        for name, tensor in named
    ]
    for handle in [call.start(in_place=True) for call in calls]:
        handle.wait()


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in an outline of nested dicts, lists and tuples."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _outline(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return ``value`` with its tensors replaced by slots, and append the tensors to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Slot(len(tensors) - 1, tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: _outline(entry, tensors) for key, entry in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_outline(entry, tensors) for entry in value)
    return value


def _slots(outline: Any) -> list[_Slot]:
    """Return the slots of an outline, in the order of their tensors."""
    if isinstance(outline, _Slot):
        return [outline]
    if isinstance(outline, dict):
        return [slot for entry in outline.values() for slot in _slots(entry)]
    if type(outline) in {list, tuple}:
        return [slot for entry in outline for slot in _slots(entry)]
    return []


def _filled(outline: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the outline with its slots replaced by tensors."""
    if isinstance(outline, _Slot):
        return tensors[outline.index]
    if isinstance(outline, dict):
        return {key: _filled(entry, tensors) for key, entry in outline.items()}
    if type(outline) in {list, tuple}:
        return type(outline)(_filled(entry, tensors) for entry in outline)
    return outline


def _description(pair: object) -> str:
    if isinstance(pair, tuple) and len(pair) == 2:
        return f"{pair[0]!r} of type {type(pair[1]).__name__}"
    return f"an entry of type {type(pair).__name__}"
