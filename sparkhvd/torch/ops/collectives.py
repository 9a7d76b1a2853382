"""Every collective described once, with the parameters that users give; ``operations`` makes the forms from it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError
from sparkhvd.torch.compression import Compressor, NoneCompressor
from sparkhvd.torch.ops.calls import Call, Tensors, as_list, first
from sparkhvd.torch.ops.movements import Allgather, Alltoall, Broadcast
from sparkhvd.torch.ops.reductions import Allreduce
from sparkhvd.torch.ops.scatter import Reducescatter


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    compression: Compressor = NoneCompressor,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Call[torch.Tensor]:
    """Combine the tensors of all ranks element by element.

    The gradient of a sum or mean is the sum or mean of the ranks' gradients; the other reductions have none.

    Args:
        tensor: the same shape and dtype on all ranks.
        average: deprecated, use ``op``.
        name: what the ranks know the operation by; made by counting when None.
        compression: the form of the tensor on its way.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the result; equal on all ranks.
        process_set: the ranks that take part, all by default.
    """
    asked = Reduction(chosen(average, op), prescale_factor, postscale_factor)
    return Call(Allreduce((tensor,), asked, SubmitOptions(name, process_set), compression), first)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    *,
    compression: Compressor = NoneCompressor,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Call[list[torch.Tensor]]:
    """Combine each of several tensors of all ranks, in one go: all of them when all ranks have all, or none.

    Args:
        tensors: as many, of the same shapes and dtypes, on all ranks.
        average: deprecated, use ``op``.
        name: what the ranks know the group by; made by counting when None.
        compression: the form of the tensors on their way.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the results; equal on all ranks.
        process_set: the ranks that take part, all by default.
    """
    asked = Reduction(chosen(average, op), prescale_factor, postscale_factor)
    return Call(Allreduce(_some(tensors), asked, SubmitOptions(name, process_set), compression, grouped=True), as_list)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    compression: Compressor = NoneCompressor,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Call[torch.Tensor]:
    """Combine the tensors of all ranks element by element, and leave each rank with its part of the rows.

    The first dimension is divided as evenly as possible; the first ranks have one row more. The gradient of a mean is
    the ranks' gradients joined, that of a sum the number of ranks times as large, so that an allgather of the result
    has the gradient of an allreduce.

    Args:
        tensor: the same shape and dtype on all ranks, of at least one dimension.
        name: what the ranks know the operation by; made by counting when None.
        compression: the form of the tensor on its way.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the result; equal on all ranks.
        process_set: the ranks that take part, all by default.
    """
    asked = Reduction(chosen(None, op), prescale_factor, postscale_factor)
    return Call(Reducescatter((tensor,), asked, SubmitOptions(name, process_set), compression), first)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    *,
    compression: Compressor = NoneCompressor,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Call[list[torch.Tensor]]:
    """Do what ``reducescatter`` does with each of several tensors, in one go.

    Args:
        tensors: as many, of the same shapes and dtypes, on all ranks.
        name: what the ranks know the group by; made by counting when None.
        compression: the form of the tensors on their way.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the results; equal on all ranks.
        process_set: the ranks that take part, all by default.
    """
    asked = Reduction(chosen(None, op), prescale_factor, postscale_factor)
    return Call(
        Reducescatter(_some(tensors), asked, SubmitOptions(name, process_set), compression, grouped=True), as_list
    )


def allgather(
    tensor: torch.Tensor, name: str | None = None, *, process_set: ProcessSet | None = None
) -> Call[torch.Tensor]:
    """Join the tensors of all ranks along the first dimension, in rank order.

    The gradient is this rank's part of the mean of the ranks' gradients.

    Args:
        tensor: the same dtype and shape on all ranks but for the first dimension.
        name: what the ranks know the operation by; made by counting when None.
        process_set: the ranks that take part, all by default.
    """
    return Call(Allgather((tensor,), SubmitOptions(name, process_set)), first)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, *, process_set: ProcessSet | None = None
) -> Call[list[torch.Tensor]]:
    """Join each of several tensors with those of the other ranks, in one go.

    Args:
        tensors: as many on all ranks; of the same dtypes and shapes but for the first dimensions.
        name: what the ranks know the group by; made by counting when None.
        process_set: the ranks that take part, all by default.
    """
    return Call(Allgather(_some(tensors), SubmitOptions(name, process_set), grouped=True), as_list)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, *, process_set: ProcessSet | None = None
) -> Call[torch.Tensor]:
    """The tensor of ``root_rank`` on every rank.

    The gradient on the root is the mean of the ranks' gradients, elsewhere zero.

    Args:
        tensor: the same shape and dtype on all ranks.
        root_rank: the rank whose tensor counts, as numbered in the whole job.
        name: what the ranks know the operation by; made by counting when None.
        process_set: the ranks that take part, all by default.
    """
    return Call(Broadcast(tensor, root_rank, SubmitOptions(name, process_set)), first)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    *,
    process_set: ProcessSet | None = None,
) -> Call[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    """Send a part of the tensor to every rank, and join what came from each, in rank order.

    With ``splits`` the result is a pair: what came, and a tensor of how many rows came from each rank. The gradient is
    every rank's gradient of what it got from here.

    Args:
        tensor: rows for all ranks, in rank order; the same dtype and shape on all ranks but for the first dimension.
        splits: how many rows go to each rank; equal numbers when None.
        name: what the ranks know the operation by; made by counting when None.
        process_set: the ranks that take part, all by default.
    """
    if splits is None:
        return Call(Alltoall(tensor, None, SubmitOptions(name, process_set)), first)
    given = tuple(splits.tolist() if isinstance(splits, torch.Tensor) else splits)
    if any(isinstance(rows, bool) or not isinstance(rows, int) or rows < 0 for rows in given):
        raise ConfigError(f"splits={list(given)} holds something that is not a number of rows; give one per rank.")
    return Call(Alltoall(tensor, given, SubmitOptions(name, process_set)), lambda outputs, _: (outputs[0], outputs[1]))


def chosen(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """The reduction that the arguments ask for: the mean unless they say otherwise."""
    if average is None:
        return ReduceOp.AVERAGE if op is None else op if type(op) is ReduceOp else ReduceOp(op)
    if op is not None:
        raise ConfigError(f"average={average} and op={op} were both given; give op alone, average is deprecated.")
    warnings.warn("average= is deprecated; pass op=hvd.Average or op=hvd.Sum.", DeprecationWarning, stacklevel=4)
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def _some(tensors: Sequence[torch.Tensor]) -> Tensors:
    if isinstance(tensors, torch.Tensor) or not tensors:
        raise ConfigError("A grouped collective takes a list of at least one tensor; pass a list.")
    return tuple(tensors)
