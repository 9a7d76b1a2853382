"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from sparkhvd.torch.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
