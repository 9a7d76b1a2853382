"""Where Horovod defines the estimator and its model."""

from __future__ import annotations

from horovod.spark.torch import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
