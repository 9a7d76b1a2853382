"""State that PyTorch omits from pickles: hooks of parameters, and additional attributes and hooks of optimizers.

A hook may mask gradients, and a step may read an attribute, so training without them would compute other weights.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch

_PLAIN_REDUCTION = ("__getstate__", "__reduce__", "__reduce_ex__")


def has_hooks(value: object) -> bool:
    """Return whether a value is a parameter with gradient hooks."""
    return isinstance(value, torch.nn.Parameter) and any(_hooks(value))


def reduced_parameter(parameter: torch.nn.Parameter) -> tuple[Any, ...]:
    """Return the reduction of a parameter for pickle, with its hooks, which may refer to the parameter."""
    function, arguments = parameter.__reduce_ex__(2)  # type: ignore[no-untyped-call]
    return function, arguments, _hooks(parameter), None, None, _register_hooks


def has_default_pickle(value: object) -> bool:
    """Return whether a value is an optimizer whose class leaves pickling to PyTorch."""
    kind: Any = type(value)
    return isinstance(value, torch.optim.Optimizer) and all(
        getattr(kind, name) is getattr(torch.optim.Optimizer, name) for name in _PLAIN_REDUCTION
    )


def reduced_optimizer(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Return the reduction of an optimizer for pickle, with all its attributes."""
    # A scheduler has replaced `step`; the scheduler of the ranks does so again.
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}
    return copyreg.__newobj__, (type(optimizer),), attributes  # type: ignore[attr-defined]


def _hooks(parameter: torch.nn.Parameter) -> tuple[list[Any], list[Any]]:
    # torch has no public way to read the hooks
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # noqa: SLF001
    return list((before or {}).values()), list((after or {}).values())


def _register_hooks(parameter: torch.nn.Parameter, hooks: tuple[list[Any], list[Any]]) -> None:
    for hook in hooks[0]:
        parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in hooks[1]:
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
