"""Parameter groups of an optimizer as training state: callbacks may add groups, for layers that they unfreeze."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sparkhvd.torch.states import load_optimizer_state


def named_groups(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> list[list[str]]:
    """Return the names of the parameters of every group; empty for a parameter that the module does not have."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]


def load_with_groups(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    own: int,
    module: torch.nn.Module | None = None,
    names: Sequence[Sequence[str]] = (),
) -> None:
    """Load a state of the same training, in which the optimizer had more or fewer groups than now.

    Args:
        optimizer: the optimizer to change.
        state: its ``state_dict`` at another time.
        own: the number of groups that the training began with; only later groups are removed.
        module: the module with the parameters.
        names: the result of ``named_groups`` for ``state``, from which groups are added.
    """
    del optimizer.param_groups[max(own, len(state["param_groups"])) :]
    if module is not None:
        for number in range(len(optimizer.param_groups), len(names)):
            parameters: list[Any] = [module.get_parameter(name) for name in names[number]]
            if (given := state["param_groups"][number].get("param_names")) is not None:  # the user has named them
                parameters = list(zip(given, parameters, strict=True))
            optimizer.add_param_group({"params": parameters})
    load_optimizer_state(optimizer, dict(state))


@contextmanager
def options_unchanged(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Restore, after this block, the learning rates and other options of the groups that exist before it."""
    saved = [[_options(group) for group in optimizer.param_groups] for optimizer in optimizers]
    yield
    for optimizer, known in zip(optimizers, saved, strict=True):
        for group, options in zip(optimizer.param_groups, known, strict=False):
            group.update(options)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
