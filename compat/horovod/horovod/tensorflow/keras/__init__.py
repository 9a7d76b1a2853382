"""``import horovod.tensorflow.keras as hvd`` on top of ``sparkhvd.keras``."""

from __future__ import annotations

from importlib import import_module

import sparkhvd.keras as _hvd
from horovod import keras as _keras
from horovod._signatures import with_parameters
from horovod.keras import *  # noqa: F403  its __all__ lists the names

__all__ = ["DistributedOptimizer"]
__all__ += _keras.__all__

callbacks = import_module("horovod.tensorflow.keras.callbacks")  # instead of that of horovod.keras

DistributedOptimizer = with_parameters(
    "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op "
    "backward_passes_per_step average_aggregated_gradients num_groups groups process_set scale_local_gradients",
    _hvd.DistributedOptimizer,
)
