"""Parameters without gradients as training state: callbacks and hooks may unfreeze them between epochs."""

from __future__ import annotations

from collections.abc import Collection

import torch


def frozen_parameters(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that require no gradient."""
    return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def freeze_only(module: torch.nn.Module, names: Collection[str]) -> None:
    """Let all parameters except ``names`` require gradients."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad == (name in names):
            parameter.requires_grad_(name not in names)
