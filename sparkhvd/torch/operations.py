"""Asynchronous, in-place and result-less collectives on torch tensors."""

from __future__ import annotations

import warnings
from typing import TypeVar

import torch

from sparkhvd.comm import session
from sparkhvd.comm.buffers import ReduceOp
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.raw import Gathered
from sparkhvd.errors import ConfigError
from sparkhvd.torch.tensors import buffer_of, bytes_of, has_dtype, require_contiguous, stage, tensor_of

T = TypeVar("T")


def reduction(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """The reduction that the arguments ask for: the mean unless they say otherwise.

    Raises:
        ConfigError: both are given.
    """
    if average is None:
        return ReduceOp.AVERAGE if op is None else ReduceOp(op)
    if op is not None:
        raise ConfigError(f"average={average} and op={op} were both given; give op alone, average is deprecated.")
    warnings.warn("average= is deprecated; pass op=hvd.Average or op=hvd.Sum.", DeprecationWarning, stacklevel=3)
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Start combining the tensors of all ranks; ``synchronize(handle)`` returns the result, a new tensor.

    Args:
        tensor: the same shape and dtype on all ranks.
        average: deprecated, use ``op``.
        name: what the ranks know the operation by; made by counting when None.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: multiplies the values before the reduction; equal on all ranks.
        postscale_factor: multiplies the result; equal on all ranks.
    """
    what = _called("Tensor", name)
    source = stage(tensor, what).memory
    target = torch.empty_like(source)
    device = tensor.device
    handle = session.current().reduce_buffer(
        buffer_of(source, what),
        buffer_of(target, what),
        reduction(average, op),
        name=name,
        prescale=prescale_factor,
        postscale=postscale_factor,
    )
    return handle.then(lambda _: target.to(device))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Like ``allreduce_async``, with the result in the tensor's own memory.

    Raises:
        ConfigError: the tensor is not contiguous.
    """
    what = _called("Tensor", name)
    require_contiguous(tensor, what)
    staged = stage(tensor, what)
    buffer = buffer_of(staged.memory, what)
    handle = session.current().reduce_buffer(
        buffer,
        buffer,
        reduction(average, op),
        name=name,
        prescale=prescale_factor,
        postscale=postscale_factor,
    )
    return handle.then(lambda _: staged.write_back())


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine the tensors of all ranks in place; see ``allreduce_async``."""
    return allreduce_async_(
        tensor,
        name=name,
        op=reduction(average, op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    ).wait()


def gather_async(tensor: torch.Tensor, name: str | None) -> Handle[tuple[torch.Tensor, tuple[int, ...]]]:
    """Start an allgather; the result is the joined tensor and the rows that each rank gave."""
    what = _called("Tensor", name)
    source = stage(tensor, what).memory

    def join(gathered: Gathered) -> tuple[torch.Tensor, tuple[int, ...]]:
        return tensor_of(gathered.content, tensor.detach(), sum(gathered.first_dims)), gathered.first_dims

    return session.current().gather_buffer(buffer_of(source, what), name=name).then(join)


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle[torch.Tensor]:
    """Start joining the tensors of all ranks along the first dimension, in rank order.

    Args:
        tensor: the same dtype and shape on all ranks but for the first dimension.
        name: what the ranks know the operation by; made by counting when None.
    """
    return gather_async(tensor, name).then(lambda gathered: gathered[0])


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle[torch.Tensor]:
    """Start sending the tensor of ``root_rank`` to all ranks, which receive it as a new tensor.

    Args:
        tensor: the same shape and dtype on all ranks.
        root_rank: the rank whose tensor counts.
        name: what the ranks know the operation by; made by counting when None.
    """
    what = _called("Tensor", name)
    source = stage(tensor, what).memory
    target = torch.empty_like(source)
    device = tensor.device
    handle = session.current().broadcast_buffer(buffer_of(source, what), buffer_of(target, what), root_rank, name=name)
    return handle.then(lambda _: target.to(device))


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle[torch.Tensor]:
    """Like ``broadcast_async``, with the result in the tensor's own memory.

    Raises:
        ConfigError: the tensor is not contiguous.
    """
    what = _called("Tensor", name)
    require_contiguous(tensor, what)
    buffer_of(tensor, what)
    return overwrite_async(tensor, root_rank, name)


def overwrite_async(tensor: torch.Tensor, root_rank: int, name: str | None) -> Handle[torch.Tensor]:
    """Start a broadcast into a tensor of any strides and element type."""
    staged = stage(tensor, _called("Tensor", name))
    buffer = buffer_of(staged.memory, "") if has_dtype(staged.memory) else bytes_of(staged.memory)
    handle = session.current().broadcast_buffer(buffer, buffer, root_rank, name=name)
    return handle.then(lambda _: staged.write_back())


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite the tensor with that of ``root_rank``; see ``broadcast_async``."""
    return broadcast_async_(tensor, root_rank, name).wait()


def barrier() -> None:
    """Return once every rank has called it."""
    session.current().barrier()


def poll(handle: Handle[T]) -> bool:
    """Whether ``synchronize(handle)`` would return at once."""
    return _checked(handle).done()


def synchronize(handle: Handle[T]) -> T:
    """Wait for an asynchronous collective and return its result.

    Raises:
        MismatchError: the ranks disagree on shape, dtype, operation or root.
        PeerLostError: a rank that takes part is gone.
        DeadlineExceededError: not all ranks took part in time.
    """
    return _checked(handle).wait()


def _checked(handle: Handle[T]) -> Handle[T]:
    if not isinstance(handle, Handle):
        raise ConfigError(f"{handle!r} is not a handle; pass what an *_async function returned.")
    return handle


def _called(what: str, name: str | None) -> str:
    return f"{what} {name!r}" if name else f"The {what.lower()}"
