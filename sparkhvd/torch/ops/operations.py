"""The public collectives on torch tensors, built from the descriptions in ``collectives``."""

from __future__ import annotations

import torch

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp, label_of
from sparkhvd.comm.collectives.options import SubmitOptions
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError, UnsupportedError
from sparkhvd.torch.ops import collectives, plain
from sparkhvd.torch.ops.calls import asynchronous, asynchronous_in_place, blocking, compression_at, in_place
from sparkhvd.torch.ops.devices import join_device
from sparkhvd.torch.ops.sparse import SparseSum
from sparkhvd.torch.ops.tensors import buffer_of

allreduce = blocking(compression_at(3, collectives.allreduce))
allreduce_async = asynchronous(collectives.allreduce)
allreduce_ = in_place(collectives.allreduce, plain.run_allreduce)
allreduce_async_ = asynchronous_in_place(collectives.allreduce, plain.start_allreduce)

grouped_allreduce = blocking(compression_at(3, collectives.grouped_allreduce))
grouped_allreduce_async = asynchronous(collectives.grouped_allreduce)
grouped_allreduce_ = in_place(collectives.grouped_allreduce)
grouped_allreduce_async_ = asynchronous_in_place(collectives.grouped_allreduce)

reducescatter = blocking(compression_at(2, collectives.reducescatter))
reducescatter_async = asynchronous(collectives.reducescatter)
grouped_reducescatter = blocking(compression_at(2, collectives.grouped_reducescatter))
grouped_reducescatter_async = asynchronous(collectives.grouped_reducescatter)

allgather = blocking(collectives.allgather)
allgather_async = asynchronous(collectives.allgather)
grouped_allgather = blocking(collectives.grouped_allgather)
grouped_allgather_async = asynchronous(collectives.grouped_allgather)

broadcast = blocking(collectives.broadcast)
broadcast_async = asynchronous(collectives.broadcast)
broadcast_ = in_place(collectives.broadcast)
broadcast_async_ = asynchronous_in_place(collectives.broadcast)

alltoall = blocking(collectives.alltoall)
alltoall_async = asynchronous(collectives.alltoall)


def sparse_allreduce(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet | None = None,
) -> torch.Tensor:
    """Return the coalesced sum or mean of the ranks' sparse (COO) tensors; see ``sparse_allreduce_async``."""
    return sparse_allreduce_async(tensor, name, op, process_set).wait()


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet | None = None,
) -> Handle[torch.Tensor]:
    """Start to add up the ranks' sparse (COO) tensors; ``synchronize(handle)`` returns the result.

    All ranks receive the entries of all ranks and add them up. Autograd does not record it.

    Args:
        tensor: the same dtype and shape on all ranks; the numbers of entries may differ.
        name: the operation's name, equal on all ranks; numbered automatically when None.
        op: ``Average`` or ``Sum``.
        process_set: the ranks that take part, all by default.
    """
    what = label_of("Tensor", name)
    if tensor.layout is not torch.sparse_coo:
        raise ConfigError(f"{what} has layout {tensor.layout}, but must have torch.sparse_coo; use allreduce().")
    if op not in {ReduceOp.AVERAGE, ReduceOp.SUM}:
        raise UnsupportedError(f"{what} is sparse and cannot be combined with op={op}; use Average or Sum.")
    communicator = session.current()
    total = SparseSum(tensor.detach(), op, communicator.channel(process_set).ranks, what)
    content = buffer_of(total.pack(tensor), what)
    return communicator.gather_buffer(content, SubmitOptions(name, process_set)).then(total.combine)


def barrier(process_set: ProcessSet | None = None) -> None:
    """Return once every rank of the process set (all ranks by default) has called it."""
    session.current().barrier(process_set=process_set)


def join(device: int | None = None, process_set: ProcessSet | None = None) -> int:
    """Announce that this rank has no more data, and wait until all ranks have joined.

    While it waits, this rank takes part in the other ranks' allreduces and reducescatters with zeros (an average still
    divides by the number of all ranks), in their allgathers without rows, in their barriers, and in broadcasts of a
    root that has not joined. Other collectives fail.

    Args:
        device: with NCCL, the CUDA device that this rank uses for the other ranks' operations; by default the current
            device.
        process_set: the ranks that take part, all by default.

    Returns:
        The rank that joined last.
    """
    communicator = session.current()
    return communicator.join(process_set=process_set, device=join_device(communicator.channel(process_set), device))
