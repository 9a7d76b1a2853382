"""Where Horovod defines the estimator and its model."""

from __future__ import annotations

from horovod.spark.lightning import MIN_PL_VERSION, TorchEstimator, TorchModel

__all__ = ["MIN_PL_VERSION", "TorchEstimator", "TorchModel"]
