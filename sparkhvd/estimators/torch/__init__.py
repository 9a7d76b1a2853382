"""``TorchEstimator``: train PyTorch modules on Spark DataFrames."""

from __future__ import annotations

from sparkhvd.estimators.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
