"""The collectives on PyTorch tensors, and the functions of every framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import sparkhvd.torch as _hvd
from horovod._signatures import with_parameters, with_scope
from horovod.common import interface
from horovod.common.basics import HorovodBasics
from horovod.common.interface import *  # noqa: F403  its __all__ lists the names
from horovod.common.util import get_average_backwards_compatibility_fun
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.errors import HorovodInternalError
from sparkhvd.torch import barrier, poll, synchronize
from sparkhvd.torch.compression import Compression

__all__ = [
    "HorovodInternalError",
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
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += interface.__all__

_basics = HorovodBasics(__file__)

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(interface)

allgather = with_scope("allgather", _hvd.allgather)
allgather_async = with_scope("allgather", _hvd.allgather_async)
allreduce = with_scope("allreduce", _hvd.allreduce)
allreduce_ = with_scope("allreduce", _hvd.allreduce_)
allreduce_async = with_scope("allreduce", _hvd.allreduce_async)
allreduce_async_ = with_scope("allreduce", _hvd.allreduce_async_)
broadcast = with_scope("broadcast", _hvd.broadcast)
broadcast_ = with_scope("broadcast", _hvd.broadcast_)
broadcast_async = with_scope("broadcast", _hvd.broadcast_async)
broadcast_async_ = with_scope("broadcast", _hvd.broadcast_async_)
grouped_allgather = with_scope("grouped_allgather", _hvd.grouped_allgather)
grouped_allgather_async = with_scope("grouped_allgather", _hvd.grouped_allgather_async)
grouped_allreduce = with_scope("grouped_allreduce", _hvd.grouped_allreduce)
grouped_allreduce_ = with_scope("grouped_allreduce", _hvd.grouped_allreduce_)
grouped_allreduce_async = with_scope("grouped_allreduce", _hvd.grouped_allreduce_async)
grouped_allreduce_async_ = with_scope("grouped_allreduce", _hvd.grouped_allreduce_async_)
grouped_reducescatter = with_scope("grouped_reducescatter", _hvd.grouped_reducescatter)
grouped_reducescatter_async = with_scope("grouped_reducescatter", _hvd.grouped_reducescatter_async)
reducescatter = with_scope("reducescatter", _hvd.reducescatter)
reducescatter_async = with_scope("reducescatter", _hvd.reducescatter_async)
_alltoall = with_scope("alltoall", _hvd.alltoall)
_alltoall_async = with_scope("alltoall", _hvd.alltoall_async)
_sparse_allreduce_async = with_scope("sparse_allreduce", _hvd.sparse_allreduce_async)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: interface.ProcessSet = interface.global_process_set,
) -> Any:
    """See ``sparkhvd.torch.alltoall``; the numbers of received rows are ``int32``."""
    return _with_int32(_alltoall(tensor, splits, name, process_set))


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: interface.ProcessSet = interface.global_process_set,
) -> Any:
    """Start ``alltoall``; ``synchronize(handle)`` returns its result."""
    return _alltoall_async(tensor, splits, name, process_set).then(_with_int32)


def _with_int32(result: Any) -> Any:
    if not isinstance(result, tuple):
        return result
    content, received = result
    return content, received.to(torch.int32)


class HorovodAllreduce:
    """Horovod's autograd function of allreduces, for programs that call its ``apply``."""

    apply = staticmethod(
        with_parameters("tensor average name op prescale_factor postscale_factor process_set", allreduce)
    )


class HorovodAllgather:
    """Horovod's autograd function of allgathers."""

    apply = staticmethod(allgather)


class HorovodBroadcast:
    """Horovod's autograd function of broadcasts."""

    apply = staticmethod(broadcast)


class HorovodAlltoall:
    """Horovod's autograd function of alltoalls."""

    apply = staticmethod(alltoall)


class HorovodReducescatter:
    """Horovod's autograd function of reduce-scatters."""

    apply = staticmethod(with_parameters("tensor name op process_set prescale_factor postscale_factor", reducescatter))


class HorovodGroupedAllreduce:
    """Horovod's autograd function of grouped allreduces."""

    @staticmethod
    def apply(  # noqa: PLR0917  the order of the arguments is Horovod's, here and below
        average: bool | None,
        name: str | None,
        op: ReduceOp | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: interface.ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the combined tensors."""
        return tuple(
            grouped_allreduce(
                tensors, average, name, Compression.none, op, prescale_factor, postscale_factor, process_set
            )
        )


class HorovodGroupedAllgather:
    """Horovod's autograd function of grouped allgathers."""

    @staticmethod
    def apply(name: str | None, process_set: interface.ProcessSet, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gathered tensors."""
        return tuple(grouped_allgather(tensors, name, process_set))


class HorovodGroupedReducescatter:
    """Horovod's autograd function of grouped reduce-scatters."""

    @staticmethod
    def apply(
        name: str | None,
        op: ReduceOp,
        process_set: interface.ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return this rank's parts of the combined tensors."""
        return tuple(
            grouped_reducescatter(tensors, name, Compression.none, op, process_set, prescale_factor, postscale_factor)
        )


def join(device: int = -1) -> int:
    """Announce that this rank has no more data; return the rank that joined last. -1 is the current device."""
    return _hvd.join(None if device < 0 else device)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = interface.Average,
    process_set: interface.ProcessSet = interface.global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start to combine the ranks' sparse tensors; return a function that waits for the result, as Horovod does."""
    wait: Callable[[], torch.Tensor] = _sparse_allreduce_async(tensor, name, op, process_set).wait
    return wait
