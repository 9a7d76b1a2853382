"""Broadcasts and gathers of parameters, states and objects."""

from __future__ import annotations

from typing import Any

import torch

import sparkhvd.torch as _hvd
from sparkhvd.comm.interface import ProcessSet
from sparkhvd.torch import allgather_object, broadcast_object, broadcast_parameters
from sparkhvd.torch.optimizer.exchange import ExchangingOptimizer

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,  # noqa: ARG001  sparkhvd needs no model to create a state
    process_set: ProcessSet | None = None,
) -> None:
    """Overwrite the state and the options of an optimizer with the values of ``root_rank``.

    A state that does not exist yet is created first, by a step with zero gradients that leaves the parameters
    unchanged. The zero gradients remain.

    Raises:
        ValueError: the optimizer is LBFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(  # noqa: TRY004  the type is Horovod's
            "broadcast_optimizer_state() does not support torch.optim.LBFGS."
        )
    if not optimizer.state_dict()["state"] and not isinstance(optimizer, torch.optim.SparseAdam):
        _create_state(optimizer)
    _hvd.broadcast_optimizer_state(optimizer, root_rank, process_set)


@torch.no_grad()
def _create_state(optimizer: torch.optim.Optimizer) -> None:
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    values = [parameter.clone() for parameter in trained]
    # Other ranks may already have a state, so this step must not exchange gradients, unlike the distributed step.
    own_class: Any = next(base for base in type(optimizer).__mro__ if not issubclass(base, ExchangingOptimizer))
    own_class.step(optimizer)
    for parameter, value in zip(trained, values, strict=True):
        parameter.copy_(value)
