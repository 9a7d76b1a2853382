"""``TorchEstimator`` with Horovod's meaning, and its model."""

from __future__ import annotations

from horovod.spark.common.estimator import HorovodsMeaning
from horovod.spark.common.model import DerivableModel
from sparkhvd.estimators import torch as _ours

__all__ = ["TorchEstimator", "TorchModel"]


class TorchModel(DerivableModel, _ours.TorchModel):
    """See ``sparkhvd.TorchModel``."""


class TorchEstimator(HorovodsMeaning, _ours.TorchEstimator):
    """See ``sparkhvd.TorchEstimator``."""

    model_class = TorchModel
