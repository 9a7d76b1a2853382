"""Distributed PyTorch: ``import sparkhvd.torch as hvd``.

Names and meanings follow Horovod's, so that scripts written for it run after changing the import.
"""

from __future__ import annotations

from sparkhvd.comm import session
from sparkhvd.comm.buffers import ReduceOp
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.session import init, is_initialized, shutdown
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
    "DistributedOptimizer",
    "Handle",
    "Max",
    "Min",
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
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]


def rank() -> int:
    """This process's number among all ranks, from 0."""
    return session.current().world.rank


def size() -> int:
    """The number of ranks."""
    return session.current().world.size


def local_rank() -> int:
    """This process's number among the ranks of its host, from 0."""
    return session.current().world.local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return session.current().world.local_size


def cross_rank() -> int:
    """This host's number among the hosts that have a rank with this local rank."""
    return session.current().world.cross_rank


def cross_size() -> int:
    """The number of hosts that have a rank with this local rank."""
    return session.current().world.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return session.current().homogeneous
