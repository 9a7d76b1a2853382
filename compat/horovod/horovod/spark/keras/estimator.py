"""The estimator and its model, in the module where Horovod defines them."""

from __future__ import annotations

from horovod.spark.keras import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
