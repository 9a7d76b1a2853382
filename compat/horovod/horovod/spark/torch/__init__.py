"""``TorchEstimator`` with Horovod's meaning, and its model."""

from __future__ import annotations

from horovod.spark.common.estimator import HorovodParams
from horovod.spark.common.model import SubclassableModel
from sparkhvd.estimators import torch as _ours

__all__ = ["TorchEstimator", "TorchModel"]


class TorchModel(SubclassableModel, _ours.TorchModel):
    """See ``sparkhvd.TorchModel``."""


class TorchEstimator(HorovodParams, _ours.TorchEstimator):
    """See ``sparkhvd.TorchEstimator``."""

    model_class = TorchModel
