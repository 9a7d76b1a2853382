"""The distributed optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.interface import Average, ProcessSet, global_process_set
from sparkhvd.torch.compression import Compression, Compressor
from sparkhvd.torch.optimizer import distributed_optimizer as _ours
from sparkhvd.torch.optimizer.delta import DeltaOptimizer
from sparkhvd.torch.optimizer.exchange import ExchangingOptimizer

__all__ = ["DistributedOptimizer"]


class _HorovodOptimizer(ExchangingOptimizer):
    """Adds the members of Horovod's optimizer that programs use to a distributed optimizer."""

    _parameter_names: dict[torch.Tensor, str]
    op: ReduceOp
    process_set: ProcessSet
    gradient_predivide_factor: float
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum ``passes`` backward passes on the rank before gradients are exchanged."""
        super().set_backward_passes_per_step(passes)
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Wait until every ``grad`` holds the combined gradient."""
        super().synchronize()
        self._restore_sparse()

    def _synchronize_once(self) -> None:
        super()._synchronize_once()
        self._restore_sparse()

    def _restore_sparse(self) -> None:
        """Undo ``sparse_as_dense`` for the one optimizer that takes sparse gradients only."""
        if isinstance(self, torch.optim.SparseAdam):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and not parameter.grad.is_sparse:
                        parameter.grad = parameter.grad.to_sparse(1)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; see ``sparkhvd.torch.DistributedOptimizer``."""
        if not isinstance(self, DeltaOptimizer) and self._exchange.synchronized and not self._skip:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(). The "
                "gradients are not exchanged again.",
                stacklevel=2,
            )
        return super().step(closure)


def DistributedOptimizer(  # noqa: N802, PLR0917  the name and the order of the arguments are Horovod's
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet | None = None,
) -> ExchangingOptimizer:
    """See ``sparkhvd.torch.DistributedOptimizer``."""
    # An empty sequence names the parameters by position, as None does.
    pairs = None if named_parameters is None else list(named_parameters) or None
    wrapped: Any = _ours.DistributedOptimizer(
        optimizer,
        pairs,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        sparse_as_dense,
        process_set,
    )
    optimizer_class = type(wrapped)
    wrapped.__class__ = type(
        optimizer_class.__name__, (_HorovodOptimizer, optimizer_class), {"__module__": optimizer_class.__module__}
    )
    names = pairs or [
        (f"allreduce.noname.{group}.{index}", parameter)
        for group, options in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(options["params"])
    ]
    wrapped.op, wrapped.process_set = op, process_set or global_process_set
    wrapped.gradient_predivide_factor = gradient_predivide_factor
    wrapped.backward_passes_per_step = backward_passes_per_step
    wrapped._parameter_names = {parameter: name for name, parameter in names}  # noqa: SLF001
    distributed: ExchangingOptimizer = wrapped
    return distributed
