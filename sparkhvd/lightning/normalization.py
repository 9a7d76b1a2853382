"""Batch normalization over the rows of all ranks, for ``Trainer(sync_batchnorm=True)``."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from sparkhvd.torch import SyncBatchNorm


class ReplacedNormalizations:
    """Replaces every batch normalization in a module until ``close()`` restores the user's own layers."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._replaced: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []
        replacements: dict[torch.nn.Module, torch.nn.Module] = {}
        for parent in list(module.modules()):
            for name, layer in parent._modules.items():  # noqa: SLF001  (named_children omits further names of a layer)
                if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm):
                    self._replaced.append((parent, name, layer))
                    if layer not in replacements:
                        replacements[layer] = SyncBatchNorm.convert_sync_batchnorm(layer)
                    setattr(parent, name, replacements[layer])

    def close(self) -> None:
        """Restore the layers, with the statistics and weights of their replacements."""
        for parent, name, layer in self._replaced:
            layer.load_state_dict(getattr(parent, name).state_dict())
            layer.train(getattr(parent, name).training)
            setattr(parent, name, layer)
        self._replaced = []
