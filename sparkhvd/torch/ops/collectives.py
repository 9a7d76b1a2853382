"""One description of every collective, with the user's parameters; ``operations`` builds the public forms from it."""

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


def allreduce(  # noqa: PLR0917  the order of the arguments is Horovod's
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    compression: Compressor = NoneCompressor,
) -> Call[torch.Tensor]:
    """Combine the tensors of all ranks element by element.

    The gradient of a sum or mean is the sum or mean of the ranks' gradients; the other reductions have none.

    Args:
        tensor: the same shape and dtype on all ranks.
        average: deprecated, use ``op``.
        name: the operation's name, equal on all ranks; numbered automatically when None.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the result; equal on all ranks.
        process_set: the ranks that take part, all by default.
        compression: compresses the tensor for transfer.
    """
    reduction = Reduction(reduction_op(average, op), prescale_factor, postscale_factor)
    return Call(Allreduce((tensor,), reduction, SubmitOptions(name, process_set), compression), first)


def grouped_allreduce(  # noqa: PLR0917  the order of the arguments is Horovod's
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    compression: Compressor = NoneCompressor,
) -> Call[list[torch.Tensor]]:
    """Combine several tensors of all ranks in one operation, which runs once all ranks have submitted all tensors.

    Args:
        tensors: the same number of tensors, with the same shapes and dtypes, on all ranks.
        average: deprecated, use ``op``.
        name: the group's name, equal on all ranks; numbered automatically when None.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the results; equal on all ranks.
        process_set: the ranks that take part, all by default.
        compression: compresses the tensors for transfer.
    """
    reduction = Reduction(reduction_op(average, op), prescale_factor, postscale_factor)
    return Call(
        Allreduce(_checked_group(tensors), reduction, SubmitOptions(name, process_set), compression, grouped=True),
        as_list,
    )


def reducescatter(  # noqa: PLR0917  the order of the arguments is Horovod's
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compressor = NoneCompressor,
) -> Call[torch.Tensor]:
    """Combine the tensors of all ranks element by element, and return this rank's part of the rows.

    The first dimension is split as evenly as possible; the first ranks get one more row. The gradient of a mean is
    the concatenation of the ranks' gradients; that of a sum is larger by a factor of the number of ranks, so that an
    allgather of the result has the gradient of an allreduce.

    Args:
        tensor: the same shape and dtype on all ranks, of at least one dimension.
        name: the operation's name, equal on all ranks; numbered automatically when None.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        process_set: the ranks that take part, all by default.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the result; equal on all ranks.
        compression: compresses the tensor for transfer.
    """
    reduction = Reduction(reduction_op(None, op), prescale_factor, postscale_factor)
    return Call(Reducescatter((tensor,), reduction, SubmitOptions(name, process_set), compression), first)


def grouped_reducescatter(  # noqa: PLR0917  the order of the arguments is Horovod's
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compressor = NoneCompressor,
) -> Call[list[torch.Tensor]]:
    """Reduce and scatter several tensors in one operation; see ``reducescatter``.

    Args:
        tensors: the same number of tensors, with the same shapes and dtypes, on all ranks.
        name: the group's name, equal on all ranks; numbered automatically when None.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        process_set: the ranks that take part, all by default.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the results; equal on all ranks.
        compression: compresses the tensors for transfer.
    """
    reduction = Reduction(reduction_op(None, op), prescale_factor, postscale_factor)
    return Call(
        Reducescatter(_checked_group(tensors), reduction, SubmitOptions(name, process_set), compression, grouped=True),
        as_list,
    )


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet | None = None
) -> Call[torch.Tensor]:
    """Concatenate the tensors of all ranks along the first dimension, in rank order.

    The gradient is this rank's part of the mean of the ranks' gradients.

    Args:
        tensor: the same dtype and shape on all ranks, except for the first dimension.
        name: the operation's name, equal on all ranks; numbered automatically when None.
        process_set: the ranks that take part, all by default.
    """
    return Call(Allgather((tensor,), SubmitOptions(name, process_set)), first)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet | None = None
) -> Call[list[torch.Tensor]]:
    """Gather several tensors in one operation; see ``allgather``.

    Args:
        tensors: the same number on all ranks, with the same dtypes, and the same shapes except for the first dimension.
        name: the group's name, equal on all ranks; numbered automatically when None.
        process_set: the ranks that take part, all by default.
    """
    return Call(Allgather(_checked_group(tensors), SubmitOptions(name, process_set), grouped=True), as_list)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Call[torch.Tensor]:
    """Return the tensor of ``root_rank`` on every rank.

    The gradient is the mean of the ranks' gradients on the root, and zero elsewhere.

    Args:
        tensor: the same shape and dtype on all ranks.
        root_rank: the rank whose tensor is sent, numbered in the whole job.
        name: the operation's name, equal on all ranks; numbered automatically when None.
        process_set: the ranks that take part, all by default.
    """
    return Call(Broadcast(tensor, root_rank, SubmitOptions(name, process_set)), first)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Call[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    """Send a part of the tensor to every rank, and concatenate the parts received from all ranks, in rank order.

    With ``splits`` the result is a pair: the received rows, and a tensor with the number of rows from each rank. For
    the gradient, every rank returns the gradient of the rows that it received from this rank.

    Args:
        tensor: rows for all ranks, in rank order; the same dtype and shape on all ranks but for the first dimension.
        splits: the number of rows for each rank; equal numbers when None.
        name: the operation's name, equal on all ranks; numbered automatically when None.
        process_set: the ranks that take part, all by default.
    """
    if splits is None:
        return Call(Alltoall(tensor, None, SubmitOptions(name, process_set)), first)
    row_counts = tuple(splits.tolist() if isinstance(splits, torch.Tensor) else splits)
    return Call(
        Alltoall(tensor, row_counts, SubmitOptions(name, process_set)), lambda outputs, _: (outputs[0], outputs[1])
    )


def reduction_op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """Return the reduction that the arguments select, ``Average`` by default."""
    if average is None:
        return ReduceOp.AVERAGE if op is None else op if type(op) is ReduceOp else ReduceOp(op)
    if op is not None:
        raise ConfigError(f"average={average} and op={op} are both set. Pass op only; average is deprecated.")
    warnings.warn("average= is deprecated; pass op=hvd.Average or op=hvd.Sum.", DeprecationWarning, stacklevel=4)
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def _checked_group(tensors: Sequence[torch.Tensor]) -> Tensors:
    if isinstance(tensors, torch.Tensor) or not tensors:
        raise ConfigError("A grouped collective takes a list of at least one tensor; pass a list.")
    return tuple(tensors)
