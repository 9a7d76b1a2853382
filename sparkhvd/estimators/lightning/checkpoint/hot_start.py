"""Start a LightningModule and its optimizers with the state of an earlier fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparkhvd._util.counts import counted
from sparkhvd.errors import ParamError
from sparkhvd.estimators.torch.schedule import repeat_initial_step
from sparkhvd.torch.states import load_optimizer_state

_KEPT_MODES = "_sparkhvd_parts_in_evaluation_mode"  # an attribute of fitted models


def keep_modes(model: torch.nn.Module) -> None:
    """Keep the names of the parts that a trained module has in evaluation mode, such as frozen layers.

    Lightning trains a module with them in this mode. A fitted model is in evaluation mode as a whole.
    """
    vars(model).pop(_KEPT_MODES, None)
    if model.training and (names := [name for name, part in model.named_modules() if not part.training]):
        vars(model)[_KEPT_MODES] = names


def train_as_before(model: torch.nn.Module) -> None:
    """Set a module to training mode, except for the parts that ``keep_modes`` has kept."""
    model.train()
    parts = dict(model.named_modules())
    for name in vars(model).pop(_KEPT_MODES, ()):
        if name in parts:
            parts[name].training = False


def load_earlier_states(
    optimizers: Sequence[torch.optim.Optimizer], earlier: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any]
) -> None:
    """Load the state, learning rates and other options of earlier optimizers.

    Schedulers then start as if they had been created for the earlier optimizers, as with a plain module's optimizer.

    Args:
        optimizers: optimizers that ``configure_optimizers`` has just created.
        earlier: optimizers of the earlier fit, over the same parameters.
        schedulers: schedulers of ``optimizers``.

    Raises:
        ParamError: the optimizers differ in their classes or parameters.
    """
    if [_identity(optimizer) for optimizer in optimizers] != [_identity(optimizer) for optimizer in earlier]:
        raise ParamError(
            f"optimizer holds {_describe_optimizers(earlier)}, but configure_optimizers creates "
            f"{_describe_optimizers(optimizers)}. The state cannot be loaded unless the kinds of optimizers, their "
            "parameters and the order of both are the same. Leave optimizer out to begin with a new state."
        )
    for optimizer, before in zip(optimizers, earlier, strict=True):
        state = before.state_dict()
        new_groups = optimizer.state_dict()["param_groups"]  # including the values that schedulers have set
        groups = [{**own, **known} for own, known in zip(new_groups, state["param_groups"], strict=True)]
        load_optimizer_state(optimizer, {**state, "param_groups": groups})
    for scheduler in schedulers:
        repeat_initial_step(scheduler)


def _identity(optimizer: torch.optim.Optimizer) -> tuple[str, list[list[int]]]:
    parameters = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    return type(optimizer).__qualname__, parameters


def _describe_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    counts = [sum(len(group["params"]) for group in optimizer.param_groups) for optimizer in optimizers]
    named = [
        f"{type(optimizer).__name__} ({counted(count, 'parameter')})"
        for optimizer, count in zip(optimizers, counts, strict=True)
    ]
    return ", ".join(named) or "none"
