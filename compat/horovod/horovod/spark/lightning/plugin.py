"""The plug-in of sparkhvd's ``LightningEstimator``, for modules that were written for Lightning 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from horovod.spark.lightning.lightning_1 import refuse_removed_steps, with_lightning_1_hooks
from sparkhvd.data.read.batches import Arrays
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.estimators.lightning.package import LightningPackage
from sparkhvd.estimators.lightning.plugin import LightningPlugin, needs_logger, unpack
from sparkhvd.estimators.lightning.trainer import LightningTrainer
from sparkhvd.estimators.plugin import TrainSpec
from sparkhvd.lightning.flavour import import_lightning
from sparkhvd.world import World


class HorovodPlugin(LightningPlugin):
    """Trains modules with the hooks of Lightning 1, too, and callbacks that need a logger without one."""

    def check(self, params: Mapping[str, object], schema: DataSchema, rows: Arrays | None) -> list[tuple[int, ...]]:
        """See ``LightningPlugin.check``; refuses steps of Lightning 1 that Lightning 2 does not call."""
        refuse_removed_steps(params["model"])
        return super().check({**params, "logger": True if params["logger"] is None else params["logger"]}, schema, rows)

    def trainer(self, payload: bytes, spec: TrainSpec, world: World) -> LightningTrainer:
        """Return the trainer of one rank."""
        return LightningTrainer(with_lightning_1_hooks(_with_logger(unpack(payload))), spec, world)


def _with_logger(package: LightningPackage) -> LightningPackage:
    """Return the package with a logger if a callback needs one; Horovod's Trainer always has one."""
    if package.logger is not None or not any(map(needs_logger, package.callbacks)):
        return package
    return replace(package, logger=import_lightning(package.flavour).loggers.CSVLogger("logs"))


PLUGIN = HorovodPlugin()
