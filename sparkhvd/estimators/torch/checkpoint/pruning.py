"""Masks of pruned weights (``torch.nn.utils.prune``): a part of the training state, because callbacks may prune."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.nn.utils import prune


def pruning_masks(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the mask of every pruned tensor by the tensor's name."""
    return {f"{path}.{name}" if path else name: getattr(layer, f"{name}_mask") for path, layer, name in _pruned(module)}


def prune_only(module: torch.nn.Module, masks: Mapping[str, torch.Tensor]) -> None:
    """Prune exactly the tensors of ``masks``; a tensor that is already pruned keeps its method and mask."""
    already_pruned = set()
    for path, layer, name in list(_pruned(module)):
        key = f"{path}.{name}" if path else name
        already_pruned.add(key)
        if key not in masks:
            prune.remove(layer, name)  # type: ignore[no-untyped-call]
    for key, mask in masks.items():
        if key not in already_pruned:
            path, _, name = key.rpartition(".")
            layer = module.get_submodule(path)
            prune.custom_from_mask(layer, name, mask.to(getattr(layer, name)))  # type: ignore[no-untyped-call]


def _pruned(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Yield the path and the layer of every pruned tensor, and the tensor's name in the layer."""
    for path, layer in module.named_modules():
        for hook in layer._forward_pre_hooks.values():  # noqa: SLF001  (as torch.nn.utils.prune.is_pruned)
            if isinstance(hook, prune.BasePruningMethod):
                yield path, layer, hook._tensor_name  # noqa: SLF001
