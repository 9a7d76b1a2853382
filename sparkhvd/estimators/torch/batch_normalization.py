"""Batch normalization in torch modules."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from sparkhvd.estimators.batch_dependence import BatchDependence
from sparkhvd.torch.sync_batch_norm import SyncBatchNorm

_SYNCHRONIZED = (SyncBatchNorm, torch.nn.SyncBatchNorm)
_OF_ROWS = (torch.nn.BatchNorm1d, torch.nn.LazyBatchNorm1d, *_SYNCHRONIZED)


def batch_dependence_of(model: object) -> BatchDependence:
    """Return the batch normalization layers of a module; none if ``model`` is not a module."""
    if not isinstance(model, torch.nn.Module):
        return BatchDependence()
    layers = [(name or "the model", layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    return BatchDependence(
        local=tuple(name for name, layer in layers if not isinstance(layer, _SYNCHRONIZED)),
        synchronized="sparkhvd.torch.SyncBatchNorm.convert_sync_batchnorm(model)",
        pairs=tuple(name for name, layer in layers if isinstance(layer, _OF_ROWS)),
    )
