"""Transfer of CUDA tensors between the ranks by NCCL, in the order of CUDA streams."""

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
_TRANSFERABLE = _FLOATS | _INTEGERS | {torch.bool, torch.int16, torch.uint16}


def uses_nccl(tensors: Sequence[torch.Tensor], process_set: ProcessSet | None, op: ReduceOp | None = None) -> bool:
    """Return whether NCCL transfers a group of tensors, and reduces it with ``op`` if that is set.

    All other tensors are staged through the CPU. Ranks whose tensors are on the same kinds of devices reach the same
    decision.
    """
    if not tensors[0].is_cuda:
        return False
    channel = session.current().channel(process_set)
    if not channel.on_devices:
        channel.suggestion.make()
        return False
    first = tensors[0].device
    return all(
        tensor.device == first and tensor.layout is torch.strided and nccl_supports(tensor.dtype, op)
        for tensor in tensors
    )


def reduces_with_nccl(
    tensors: Sequence[torch.Tensor], reduction: Reduction, options: SubmitOptions, compression: Compressor
) -> bool:
    """Return whether NCCL reduces the tensors; with a user's own compressor they are staged through the CPU.

    The built-in compressors convert floats to floats, so the dtypes that NCCL supports stay the same.
    """
    built_in = compression is NoneCompressor or isinstance(compression, CastCompressor)
    return built_in and uses_nccl(tensors, options.process_set, reduction.op)


def nccl_supports(dtype: torch.dtype, op: ReduceOp | None) -> bool:
    """Return whether NCCL reduces the dtype with ``op``; without ``op``, whether it transfers the dtype."""
    if op is None:
        return dtype in _TRANSFERABLE
    # NCCL rounds means of integers differently from the core.
    return op is not ReduceOp.ADASUM and (dtype in _FLOATS or (dtype in _INTEGERS and op is not ReduceOp.AVERAGE))


def in_stream_order(handle: Handle[T], device: torch.device) -> Handle[T]:
    """Return a handle whose first wait also makes the stream that is current at that time wait for the operation."""
    return handle.behind(lambda: stream_of(device))


def stream_of(device: torch.device) -> int:
    """Return the address of this thread's current stream."""
    return torch.cuda.current_stream(device).cuda_stream


def scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place. Integers are multiplied as float64 and truncated, as in the core."""
    if factor == 1.0:
        return
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.mul_(factor)
        else:
            tensor.copy_(tensor.double().mul_(factor).trunc_())


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the product as a new tensor, or the tensor itself if the factor is 1."""
    if factor == 1.0:
        return tensor
    product = tensor.clone()
    scale(product, factor)
    return product


def join_device(channel: Channel, device: int | None) -> tuple[int, int] | None:
    """Return the device and the stream that a joined rank uses for the other ranks' operations on CUDA tensors.

    Args:
        channel: the connection to the other ranks.
        device: the device's number; None or a negative number selects the current device.
    """
    if not channel.on_devices or not torch.cuda.is_available():
        return None
    number = torch.cuda.current_device() if device is None or device < 0 else device
    return number, stream_of(torch.device("cuda", number))
