"""Loading the weights of a checkpoint whose module was pruned, or got new buffers, during the training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparkhvd.estimators.lightning.checkpoint.best_model import run_state
from sparkhvd.estimators.torch.checkpoint.pruning import prune_only
from sparkhvd.torch.buffers import take_new_buffers

if TYPE_CHECKING:
    from sparkhvd.estimators.lightning.checkpoint.best_model import State


def prepare_module(module: torch.nn.Module, checkpoint: State) -> None:
    """Give a module the parameters and buffers that ``checkpoint`` has, so that ``load_state_dict`` succeeds."""
    weights = checkpoint["state_dict"]
    prune_only(module, {name: mask for name, mask in _masks(checkpoint).items() if f"{name}_orig" in weights})
    take_new_buffers(module, weights)


def prune_as_saved(module: torch.nn.Module, checkpoint: State) -> None:
    """Prune a module like the one of ``checkpoint``; ``ModelPruning`` saves the pruned weights without their masks."""
    prune_only(module, _masks(checkpoint))


def _masks(checkpoint: State) -> dict[str, torch.Tensor]:
    masks: dict[str, torch.Tensor] = run_state(checkpoint).get("masks", {})
    return masks
