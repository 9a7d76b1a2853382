"""Horovod's ``TorchEstimator`` for Lightning modules, and its model."""

from __future__ import annotations

from horovod.spark.common.estimator import HorovodsMeaning
from sparkhvd.estimators import lightning as _ours

__all__ = ["MIN_PL_VERSION", "TorchEstimator", "TorchModel"]

MIN_PL_VERSION = "2.4"

TorchModel = _ours.LightningModel


class TorchEstimator(HorovodsMeaning, _ours.LightningEstimator):
    """See ``sparkhvd.LightningEstimator``."""
