"""The plug-in of sparkhvd's ``LightningEstimator``, for modules that were written for Lightning 1."""

from __future__ import annotations

from horovod.spark.lightning.lightning_1 import with_epoch_end_methods
from sparkhvd.estimators.lightning.plugin import LightningPlugin, unpack
from sparkhvd.estimators.lightning.trainer import LightningTrainer
from sparkhvd.estimators.plugin import TrainSpec
from sparkhvd.world import World


class HorovodPlugin(LightningPlugin):
    """Trains modules with the hooks of Lightning 1, too."""

    def trainer(self, payload: bytes, spec: TrainSpec, world: World) -> LightningTrainer:
        """Return the trainer of one rank."""
        return LightningTrainer(with_epoch_end_methods(unpack(payload)), spec, world)


PLUGIN = HorovodPlugin()
