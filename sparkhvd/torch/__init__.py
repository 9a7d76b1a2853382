"""Distributed PyTorch: ``import sparkhvd.torch as hvd``.

Names and meanings follow Horovod's, so that scripts written for it run after changing the import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkhvd.comm import interface
from sparkhvd.comm.handle import Handle, poll, synchronize
from sparkhvd.comm.interface import *  # noqa: F403  its __all__ lists the names
from sparkhvd.compat.horovod import missing
from sparkhvd.errors import MismatchError, PeerLostError
from sparkhvd.torch import elastic
from sparkhvd.torch.compression import Compression, Compressor
from sparkhvd.torch.ops.operations import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    reducescatter,
    reducescatter_async,
    sparse_allreduce,
    sparse_allreduce_async,
)
from sparkhvd.torch.optimizer.distributed_optimizer import DistributedOptimizer
from sparkhvd.torch.states import broadcast_optimizer_state, broadcast_parameters
from sparkhvd.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Handle",
    "MismatchError",
    "PeerLostError",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += interface.__all__


if not TYPE_CHECKING:  # with it, every name would exist for a type checker

    def __getattr__(name: str) -> object:
        raise AttributeError(missing("sparkhvd.torch", name, __all__))
