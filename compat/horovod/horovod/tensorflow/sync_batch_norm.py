"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from sparkhvd.tensorflow import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
