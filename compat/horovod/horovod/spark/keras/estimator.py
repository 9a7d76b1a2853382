"""Where Horovod defines the estimator and its model."""

from __future__ import annotations

from horovod.spark.keras import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
