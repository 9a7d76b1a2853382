"""Collectives without a framework: ``import sparkhvd.numpy as hvd``.

They take NumPy arrays, and other values that NumPy can read, such as arrays of JAX and Arrow. Names and meanings are
those of ``sparkhvd.torch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkhvd.comm import interface
from sparkhvd.comm.handle import Handle, poll, synchronize
from sparkhvd.comm.interface import *  # noqa: F403  its __all__ lists the names
from sparkhvd.compat.horovod import missing
from sparkhvd.errors import MismatchError, PeerLostError
from sparkhvd.numpy import elastic
from sparkhvd.numpy.operations import (
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
)

__all__ = [
    "Handle",
    "MismatchError",
    "PeerLostError",
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
    "synchronize",
]
__all__ += interface.__all__


if not TYPE_CHECKING:  # with it, every name would exist for a type checker

    def __getattr__(name: str) -> object:
        raise AttributeError(missing("sparkhvd.numpy", name, __all__))
