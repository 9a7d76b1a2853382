"""Horovod's ``TorchEstimator`` for Lightning modules, and its model."""

from __future__ import annotations

from horovod.spark.common.estimator import HorovodsMeaning
from horovod.spark.common.model import DerivableModel
from horovod.spark.lightning.lightning_1 import restore_names
from sparkhvd.estimators import lightning as _ours

__all__ = ["MIN_PL_VERSION", "TorchEstimator", "TorchModel"]

MIN_PL_VERSION = "2.4"

restore_names()  # programs import them after this module


class TorchModel(DerivableModel, _ours.LightningModel):
    """See ``sparkhvd.LightningModel``."""


class TorchEstimator(HorovodsMeaning, _ours.LightningEstimator):
    """See ``sparkhvd.LightningEstimator``; takes modules with the hooks of Lightning 1, too."""

    model_class = TorchModel
    plugin = "horovod.spark.lightning.plugin:PLUGIN"
