"""Masks of pruned weights (``torch.nn.utils.prune``) as training state: callbacks may prune between epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.nn.utils import prune


def pruning_masks(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the mask of every pruned tensor by the tensor's name."""
    return {f"{path}.{name}" if path else name: getattr(part, f"{name}_mask") for path, part, name in _pruned(module)}


def prune_only(module: torch.nn.Module, masks: Mapping[str, torch.Tensor]) -> None:
    """Prune exactly the tensors of ``masks``; a tensor that is already pruned keeps its method and mask."""
    known = set()
    for path, part, name in list(_pruned(module)):
        key = f"{path}.{name}" if path else name
        known.add(key)
        if key not in masks:
            prune.remove(part, name)  # type: ignore[no-untyped-call]
    for key, mask in masks.items():
        if key not in known:
            path, _, name = key.rpartition(".")
            part = module.get_submodule(path)
            prune.custom_from_mask(part, name, mask.to(getattr(part, name)))  # type: ignore[no-untyped-call]


def _pruned(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Yield the path and the layer of every pruned tensor, and the tensor's name in the layer."""
    for path, part in module.named_modules():
        for hook in part._forward_pre_hooks.values():  # noqa: SLF001  (as torch.nn.utils.prune.is_pruned)
            if isinstance(hook, prune.BasePruningMethod):
                yield path, part, hook._tensor_name  # noqa: SLF001
