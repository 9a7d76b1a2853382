"""Distributed PyTorch: ``import sparkhvd.torch as hvd``.

Names and meanings follow Horovod's, so that scripts written for it run after changing the import.
"""

from __future__ import annotations

from sparkhvd.comm.buffers import ReduceOp
from sparkhvd.comm.features import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.session import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from sparkhvd.errors import MismatchError, PeerLostError
from sparkhvd.torch.compression import Compression, Compressor
from sparkhvd.torch.differentiable import allgather, allreduce, broadcast
from sparkhvd.torch.operations import (
    allgather_async,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    poll,
    synchronize,
)
from sparkhvd.torch.optimizer import DistributedOptimizer
from sparkhvd.torch.states import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

__all__ = [
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Handle",
    "Max",
    "Min",
    "MismatchError",
    "PeerLostError",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "synchronize",
]
