"""Horovod's ``TorchEstimator`` for Lightning modules, and its model."""

from __future__ import annotations

from typing import Any

from horovod.spark.common.estimator import HorovodParams
from horovod.spark.common.model import SubclassableModel
from horovod.spark.lightning.lightning_1 import restore_names
from sparkhvd.estimators import lightning as _ours

__all__ = ["MIN_PL_VERSION", "TorchEstimator", "TorchModel"]

MIN_PL_VERSION = "2.4"

restore_names()  # programs import them after this module


class TorchModel(SubclassableModel, _ours.LightningModel):
    """See ``sparkhvd.LightningModel``."""


class TorchEstimator(HorovodParams, _ours.LightningEstimator):
    """See ``sparkhvd.LightningEstimator``; takes modules with the hooks of Lightning 1, too."""

    model_class = TorchModel
    plugin = "horovod.spark.lightning.plugin:PLUGIN"

    def setParams(self, **values: Any) -> Any:  # noqa: N802  (pyspark's name)
        """Set several parameters by keyword; ``profiler`` becomes an argument of the Trainer."""
        profiler = values.pop("profiler", None)
        if profiler is not None:
            values["trainer_args"] = {**(values.get("trainer_args", self.getTrainerArgs()) or {}), "profiler": profiler}
        return super().setParams(**values)
