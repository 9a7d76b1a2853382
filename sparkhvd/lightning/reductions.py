"""Reductions and gathers over the ranks for Lightning and torchmetrics."""

from __future__ import annotations

from typing import Any

import torch

import sparkhvd.torch as hvd
from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError

_OPERATIONS = {
    "mean": ReduceOp.AVERAGE,
    "avg": ReduceOp.AVERAGE,
    "sum": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
    "prod": ReduceOp.PRODUCT,
}


def reduce_op(wanted: object) -> ReduceOp:
    """Return the operation for a name (``"mean"``, ...), a ``torch.distributed.ReduceOp``, or None for the mean.

    Raises:
        ConfigError: the reduction is unknown.
    """
    if isinstance(wanted, ReduceOp):
        return wanted
    name = "mean" if wanted is None else str(wanted).rpartition(".")[2].lower()
    if name not in _OPERATIONS:
        raise ConfigError(f"Unknown reduction {wanted!r}; expected one of {', '.join(_OPERATIONS)}.")
    return _OPERATIONS[name]


def process_set_of(group: object) -> ProcessSet | None:
    """Return the process set of a ``group`` argument.

    Raises:
        ConfigError: it is a group of torch.distributed, which this strategy does not use.
    """
    if group is not None and not isinstance(group, ProcessSet):
        raise ConfigError(
            f"{group!r} is not a process set; pass the result of hvd.add_process_set(), or leave group out."
        )
    return group


def reduce_tensor(tensor: torch.Tensor, wanted: object, group: object = None) -> torch.Tensor:
    """Return the reduction over the ranks; the mean of integers is a float."""
    op, process_set = reduce_op(wanted), process_set_of(group)
    tensor = tensor.detach()
    if tensor.dtype is torch.bool:
        tensor = tensor.to(torch.int32)
    if op is ReduceOp.AVERAGE and not (tensor.is_floating_point() or tensor.is_complex()):
        size = session.current().channel(process_set).size
        return hvd.allreduce(tensor, op=ReduceOp.SUM, process_set=process_set) / size
    return hvd.allreduce(tensor, op=op, process_set=process_set)


def stack_over_ranks(tensor: torch.Tensor, group: object = None, *, sync_grads: bool = False) -> torch.Tensor:
    """Return the tensors of all ranks, which have the same shape, along a new first dimension.

    With ``sync_grads`` the gradient of ``tensor`` is the sum over the ranks, as in Lightning; ``hvd.allgather`` follows
    Horovod and returns the mean.
    """
    process_set = process_set_of(group)
    mine = (tensor if sync_grads else tensor.detach()).unsqueeze(0)
    if mine.requires_grad:
        size = session.current().channel(process_set).size
        mine.register_hook(lambda gradient: gradient * size)  # type: ignore[no-untyped-call]
    return hvd.allgather(mine, process_set=process_set)


def gather_over_ranks(tensor: torch.Tensor, group: object = None) -> list[torch.Tensor]:
    """Return the tensors of all ranks, of any shapes, in rank order.

    An empty tensor gets the type of the tensors with elements, or else rank 0's: a metric without rows does not know
    its type.
    """
    process_set = process_set_of(group)
    form = tuple(tensor.shape), tensor.dtype
    forms = hvd.allgather_object(form, name="forms of a metric's state", process_set=process_set)
    shapes = [shape for shape, _ in forms]
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    dtypes = [dtype for size, (_, dtype) in zip(sizes, forms, strict=True) if size] or [forms[0][1]]
    if not tensor.numel():
        tensor = tensor.to(dtypes[0])
    together = hvd.allgather(tensor.detach().reshape(-1), process_set=process_set)
    return [part.reshape(shape) for part, shape in zip(torch.split(together, sizes), shapes, strict=True)]


def has_other_ranks() -> bool:
    """Return whether the job has more than one rank."""
    return session.is_initialized() and session.current().world.size > 1


class SharedMetrics:
    """Lets the torchmetrics in a module compute over the rows of all ranks until ``close()``."""

    def __init__(self, module: torch.nn.Module) -> None:
        from torchmetrics import Metric  # noqa: PLC0415  (Lightning brings it)

        self._changed: list[tuple[Any, Any]] = []
        for part in module.modules():
            if isinstance(part, Metric) and part.dist_sync_fn is None:
                self._changed.append((part, part.distributed_available_fn))
                part.dist_sync_fn = gather_over_ranks
                part.distributed_available_fn = has_other_ranks

    def close(self) -> None:
        """Restore the metrics."""
        for metric, available in self._changed:
            metric.dist_sync_fn, metric.distributed_available_fn = None, available
        self._changed = []
