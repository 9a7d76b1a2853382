"""The estimator and its model, in the module where Horovod defines them."""

from __future__ import annotations

from horovod.spark.torch import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
