"""Distributed TensorFlow: ``import sparkhvd.tensorflow as hvd``.

Names and meanings follow Horovod's, so that scripts written for it run after changing the import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkhvd.comm import interface
from sparkhvd.comm.interface import *  # noqa: F403  its __all__ lists the names
from sparkhvd.compat.horovod import missing
from sparkhvd.tensorflow import elastic
from sparkhvd.tensorflow.compression import Compression
from sparkhvd.tensorflow.gradients import DistributedGradientTape, PartialDistributedGradientTape
from sparkhvd.tensorflow.operations import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from sparkhvd.tensorflow.states import broadcast_variables
from sparkhvd.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "Compression",
    "DistributedGradientTape",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_variables",
    "elastic",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]
__all__ += interface.__all__


if not TYPE_CHECKING:  # with it, every name would exist for a type checker

    def __getattr__(name: str) -> object:
        if name in {"DistributedOptimizer", "PartialDistributedOptimizer"}:
            raise AttributeError(
                f"sparkhvd.tensorflow has no {name}, because the optimizers of TensorFlow 2 are those of Keras. Use "
                f"sparkhvd.keras.{name}, or DistributedGradientTape with any other optimizer."
            )
        raise AttributeError(missing("sparkhvd.tensorflow", name, __all__))
