"""Find the layers of a PyTorch model whose result for a row depends on the other rows of the batch."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from sparkhvd.estimators.batch_dependence import BatchDependence
from sparkhvd.torch.sync_batch_norm import SyncBatchNorm

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_NEED_TWO_ROWS = (torch.nn.BatchNorm1d, torch.nn.LazyBatchNorm1d, torch.nn.SyncBatchNorm, SyncBatchNorm)


def batch_dependence_of(model: object, *, keeps_modes: bool = False) -> BatchDependence:
    """Return the names of the layers that relate the rows of a batch; no names if ``model`` is not a torch module.

    Args:
        model: the model to train.
        keeps_modes: whether layers that are in evaluation mode stay in this mode unless a hook changes it.
    """
    if not isinstance(model, torch.nn.Module):
        return BatchDependence()
    named = [(name or "the model", layer) for name, layer in model.named_modules()]
    layers = [(name, layer) for name, layer in named if isinstance(layer, _BatchNorm)]
    fixed = {name for name, layer in layers if keeps_modes and model.training and not layer.training}
    return BatchDependence(
        # torch.nn.SyncBatchNorm synchronizes only the ranks of torch.distributed
        local=tuple(name for name, layer in layers if name not in fixed and not isinstance(layer, SyncBatchNorm)),
        synchronized="sparkhvd.torch.SyncBatchNorm.convert_sync_batchnorm(model)",
        need_two_rows=tuple(name for name, layer in layers if name not in fixed and isinstance(layer, _NEED_TWO_ROWS)),
        need_two_pixels=tuple(name for name, layer in layers if name in fixed or not isinstance(layer, _NEED_TWO_ROWS)),
        frequencies=tuple(name for name, layer in named if isinstance(layer, _EMBEDDINGS) and layer.scale_grad_by_freq),
    )
