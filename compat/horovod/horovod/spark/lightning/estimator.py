"""The estimator and its model, in the module where Horovod defines them."""

from __future__ import annotations

from horovod.spark.lightning import MIN_PL_VERSION, TorchEstimator, TorchModel

__all__ = ["MIN_PL_VERSION", "TorchEstimator", "TorchModel"]
