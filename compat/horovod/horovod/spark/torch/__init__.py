"""``TorchEstimator`` with Horovod's meaning, and its model."""

from __future__ import annotations

from horovod.spark.common.estimator import HorovodsMeaning
from sparkhvd.estimators import torch as _ours

__all__ = ["TorchEstimator", "TorchModel"]

TorchModel = _ours.TorchModel


class TorchEstimator(HorovodsMeaning, _ours.TorchEstimator):
    """See ``sparkhvd.TorchEstimator``."""
