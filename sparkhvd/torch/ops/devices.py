"""CUDA tensors that NCCL moves between the ranks, in the order of CUDA streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from sparkhvd.comm import session
from sparkhvd.comm.channel import Channel
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.torch.compression import CastCompressor, Compressor, NoneCompressor

T = TypeVar("T")

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
_MOVED = _FLOATS | _INTEGERS | {torch.bool, torch.int16, torch.uint16}


def by_nccl(tensors: Sequence[torch.Tensor], process_set: ProcessSet | None, op: ReduceOp | None = None) -> bool:
    """Whether NCCL moves the tensors, which run together and are reduced with ``op`` if there is one.

    All others are staged through the CPU. Ranks whose tensors are on the same kinds of devices decide alike.
    """
    if not tensors[0].is_cuda:
        return False
    channel = session.current().channel(process_set)
    if not channel.on_devices:
        channel.suggestion.make()
        return False
    first = tensors[0].device
    return all(
        tensor.device == first and tensor.layout is torch.strided and nccl_takes(tensor.dtype, op) for tensor in tensors
    )


def reduced_by_nccl(
    tensors: Sequence[torch.Tensor], reduction: Reduction, options: SubmitOptions, compression: Compressor
) -> bool:
    """Whether NCCL reduces the tensors; what a user's own compression makes of them is staged.

    The ones that come along turn floats into floats, so that they change nothing about what NCCL takes.
    """
    known = compression is NoneCompressor or isinstance(compression, CastCompressor)
    return known and by_nccl(tensors, options.process_set, reduction.op)


def nccl_takes(dtype: torch.dtype, op: ReduceOp | None) -> bool:
    """Whether NCCL reduces elements of the type with ``op``; without one, whether they may be moved."""
    if op is None:
        return dtype in _MOVED
    # NCCL rounds means of integers in its own way.
    return op is not ReduceOp.ADASUM and (dtype in _FLOATS or (dtype in _INTEGERS and op is not ReduceOp.AVERAGE))


def in_order(handle: Handle[T], device: torch.device) -> Handle[T]:
    """The same operation; the stream that is current where its result is waited for first comes behind it."""
    return handle.behind(lambda: stream_of(device))


def stream_of(device: torch.device) -> int:
    """The address of this thread's current stream."""
    return torch.cuda.current_stream(device).cuda_stream


def scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers in double, cut off after the point, as the core does it."""
    if factor == 1.0:
        return
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.mul_(factor)
        else:
            tensor.copy_(tensor.double().mul_(factor).trunc_())


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """The product as a new tensor; the tensor itself where the factor is 1."""
    if factor == 1.0:
        return tensor
    product = tensor.clone()
    scale(product, factor)
    return product


def of_joining(channel: Channel, device: int | None) -> tuple[int, int] | None:
    """The device with which a rank that joins takes part in what others do on theirs, and a stream there.

    Args:
        channel: the way to the other ranks.
        device: the device's number; the current one where it is None or negative.
    """
    if not channel.on_devices or not torch.cuda.is_available():
        return None
    number = torch.cuda.current_device() if device is None or device < 0 else device
    return number, stream_of(torch.device("cuda", number))
