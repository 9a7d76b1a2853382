"""``import horovod.tensorflow as hvd`` on top of ``sparkhvd.tensorflow``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Never

import tensorflow as tf

import sparkhvd.tensorflow as _hvd
from horovod._signatures import with_parameters
from horovod.common.util import check_extension, gpu_available
from horovod.tensorflow import functions, mpi_ops, util
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import *  # noqa: F403  its __all__ lists the names
from horovod.tensorflow.mpi_ops import *  # noqa: F403
from horovod.tensorflow.util import _executing_eagerly as _executing_eagerly
from sparkhvd.compat.horovod import missing
from sparkhvd.tensorflow import SyncBatchNormalization

_NO_SESSIONS = (
    "sparkhvd has no graph sessions of TensorFlow 1. Run eagerly or in a tf.function, and call "
    "hvd.broadcast_variables(model.variables, root_rank=0)."
)

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "broadcast_global_variables",
    "check_extension",
    "gpu_available",
    "util",
]
__all__ += functions.__all__
__all__ += mpi_ops.__all__

_TAPE_PARAMETERS = (
    "gradtape device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor num_groups groups "
    "process_set"
)


DistributedGradientTape = with_parameters(f"{_TAPE_PARAMETERS} scale_local_gradients", _hvd.DistributedGradientTape)
PartialDistributedGradientTape = with_parameters(
    f"{_TAPE_PARAMETERS} local_layers scale_local_gradients", _hvd.PartialDistributedGradientTape
)


def DistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802  the name is Horovod's
    """Make a Keras optimizer apply the gradients of all ranks, and return it.

    Raises:
        NotImplementedError: the optimizer is one of TensorFlow 1.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise NotImplementedError(_NO_SESSIONS)
    return _keras_optimizer(optimizer, *args, **kwargs)


def _create_keras_optimizer(**kwargs: Any) -> Any:
    from horovod import keras  # noqa: PLC0415  heavy

    return keras.DistributedOptimizer(**kwargs)


_keras_optimizer = with_parameters(
    "optimizer name use_locking device_dense device_sparse compression sparse_as_dense backward_passes_per_step op "
    "gradient_predivide_factor average_aggregated_gradients num_groups groups process_set scale_local_gradients",
    _create_keras_optimizer,
)


def broadcast_global_variables(root_rank: int) -> Never:  # noqa: ARG001
    """Raise ``RuntimeError``, as Horovod does outside the graphs of TensorFlow 1."""
    raise RuntimeError(_NO_SESSIONS)


class BroadcastGlobalVariablesHook:
    """Raises ``NotImplementedError``, because it is a hook for sessions of TensorFlow 1."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(_NO_SESSIONS)


if not TYPE_CHECKING:  # with it, every name would exist for a type checker

    def __getattr__(name: str) -> object:
        if name == "elastic":  # imports Keras, which is heavy
            return import_module("horovod.tensorflow.elastic")
        raise AttributeError(missing("horovod.tensorflow", name, __all__))
