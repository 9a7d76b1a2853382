"""Reductions and gathers over the ranks for Lightning and torchmetrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
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


def reduce_op(reduction: object) -> ReduceOp:
    """Return the operation for a name (``"mean"``, ...), a ``torch.distributed.ReduceOp``, or None for the mean.

    Raises:
        ConfigError: the reduction is unknown.
    """
    if isinstance(reduction, ReduceOp):
        return reduction
    name = "mean" if reduction is None else str(reduction).rpartition(".")[2].lower()
    if name not in _OPERATIONS:
        raise ConfigError(f"Unknown reduction {reduction!r}; expected one of {', '.join(_OPERATIONS)}.")
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


def reduce_tensor(tensor: torch.Tensor, reduction: object, group: object = None) -> torch.Tensor:
    """Return the reduction over the ranks; the mean of integers is a float."""
    op, process_set = reduce_op(reduction), process_set_of(group)
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
    row = (tensor if sync_grads else tensor.detach()).unsqueeze(0)
    if row.requires_grad:
        size = session.current().channel(process_set).size
        row.register_hook(lambda gradient: gradient * size)  # type: ignore[no-untyped-call]
    return hvd.allgather(row, process_set=process_set)


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


def metrics_of(owners: Iterable[object]) -> Iterator[Any]:
    """Yield the torchmetrics of modules and callbacks, also those that no module registers: in lists and dicts."""
    from torchmetrics import Metric  # noqa: PLC0415  (Lightning brings it)

    return _instances_of(Metric, owners)


def collections_of(owners: Iterable[object]) -> Iterator[Any]:
    """Yield the collections of torchmetrics, see ``metrics_of``."""
    from torchmetrics import MetricCollection  # noqa: PLC0415

    return _instances_of(MetricCollection, owners)


def _instances_of(kind: type, owners: Iterable[object]) -> Iterator[Any]:
    queue, seen = list(owners), set[int]()
    while queue:
        value = queue.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kind):
            yield value
        if isinstance(value, Mapping):
            parts: Iterable[object] = value.values()
        else:
            parts = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
        queue += [part for part in parts if isinstance(part, torch.nn.Module | Mapping | list | tuple)]


class SharedMetrics:
    """Lets the torchmetrics of modules and callbacks compute over the rows of all ranks until ``close()``."""

    def __init__(self, *owners: object) -> None:
        self._changed: list[tuple[Any, Any]] = []
        self.include(owners)

    def include(self, owners: Iterable[object]) -> None:
        """Include the metrics of more owners, or metrics that their owners have created since."""
        for metric in metrics_of(owners):
            if metric.dist_sync_fn is None:
                self._changed.append((metric, metric.distributed_available_fn))
                metric.dist_sync_fn = gather_over_ranks
                metric.distributed_available_fn = has_other_ranks
                vars(metric)["_sync_dist"] = MethodType(_sync_lists_of_any_length, metric)

    def close(self) -> None:
        """Restore the metrics."""
        for metric, available in self._changed:
            metric.dist_sync_fn, metric.distributed_available_fn = None, available
            del metric._sync_dist  # noqa: SLF001  (set above)
        self._changed = []


def _sync_lists_of_any_length(metric: Any, dist_sync_fn: Callable[..., Any], process_group: object = None) -> None:
    """Synchronize a metric as torchmetrics does, also if the lists in its state have different lengths on the ranks.

    torchmetrics gathers a list that it does not concatenate element by element, so a rank with fewer elements would
    gather something else. Such ranks gather empty tensors instead, which are then removed.
    """
    from torchmetrics.utilities import dim_zero_cat  # noqa: PLC0415

    reductions: dict[str, Any] = metric._reductions  # noqa: SLF001
    lists = {
        name: value
        for name, reduction in reductions.items()
        if reduction is not dim_zero_cat and isinstance(value := getattr(metric, name), list)
    }
    lengths = _lengths_on_ranks(lists, process_set_of(process_group or metric.process_group)) if lists else {}
    for name, of_ranks in lengths.items():
        padding = [torch.empty(0, device=metric.device)] * (max(of_ranks) - len(lists[name]))
        setattr(metric, name, [*lists[name], *padding])
        reductions[name] = partial(_reduced_without_padding, reductions[name], of_ranks)
    try:
        type(metric)._sync_dist(metric, dist_sync_fn, process_group)  # noqa: SLF001
    finally:
        for name in lengths:
            reductions[name] = reductions[name].args[0]


def _lengths_on_ranks(lists: Mapping[str, list[Any]], process_set: ProcessSet | None) -> dict[str, list[int]]:
    """Return the lengths of each list on all ranks, if its elements are tensors; collective."""
    own = {name: len(parts) for name, parts in lists.items() if all(isinstance(part, torch.Tensor) for part in parts)}
    gathered = hvd.allgather_object(own, name="lengths of a metric's lists", process_set=process_set)
    return {name: [of_rank[name] for of_rank in gathered] for name in own if all(name in other for other in gathered)}


def _reduced_without_padding(
    reduction: Callable[[list[torch.Tensor]], Any] | None, lengths: Sequence[int], gathered: list[torch.Tensor]
) -> Any:
    """Reduce the gathered elements, which alternate between the ranks, without the padding of shorter lists."""
    elements = [part for index, part in enumerate(gathered) if index // len(lengths) < lengths[index % len(lengths)]]
    return elements if reduction is None else reduction(elements)
