"""Adasum: every rank takes a step of its own, and the steps are combined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError
from sparkhvd.torch.compression import Compressor, NoneCompressor
from sparkhvd.torch.ops.calls import Call, first
from sparkhvd.torch.ops.reductions import Allreduce
from sparkhvd.torch.optimizer.exchange import ExchangingOptimizer
from sparkhvd.torch.optimizer.parameters import checked_passes, names_by_position


@dataclass(frozen=True)
class DeltaSettings:
    """How the steps of the ranks are combined.

    Attributes:
        compression: the form of a step on its way.
        process_set: the ranks that take part, all by default.
    """

    compression: Compressor = NoneCompressor
    process_set: ProcessSet | None = None


class DeltaOptimizer(ExchangingOptimizer):
    """What ``DistributedOptimizer(op=Adasum)`` adds to the class of the optimizer that it wraps.

    Adasum (Maleki and others, 2020) adds what is orthogonal in the ranks' steps and averages what they have in common,
    so that the learning rate of one rank suits any number of them. It has to see the steps rather than the gradients,
    because what an optimizer with moments does with a gradient is not linear.
    """

    _names: dict[torch.Tensor, str]
    _settings: DeltaSettings

    def begin(self, names: Mapping[torch.Tensor, str], settings: DeltaSettings) -> None:
        """Take up the parameters, each under the name by which the ranks know it."""
        self._names, self._settings = dict(names), settings

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take this rank's own step from its own gradients, and replace it by what Adasum makes of all ranks' steps."""
        moving = [(p, self._names[p]) for group in self.param_groups for p in group["params"] if p.requires_grad]
        starts = [parameter.detach().clone() for parameter, _ in moving]
        result = super(ExchangingOptimizer, self).step(closure)
        with torch.no_grad():
            deltas = [parameter - start for (parameter, _), start in zip(moving, starts, strict=True)]
            handles = [
                self._combined(delta, name).start(in_place=True)
                for delta, (_, name) in zip(deltas, moving, strict=True)
            ]
            for handle, (parameter, _), start in zip(handles, moving, starts, strict=True):
                parameter.copy_(start.add_(handle.wait()))
        return result

    def _combined(self, delta: torch.Tensor, name: str) -> Call[torch.Tensor]:
        options = SubmitOptions(name, self._settings.process_set)
        return Call(Allreduce((delta,), Reduction(ReduceOp.ADASUM), options, self._settings.compression), first)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; the ranks know them by position."""
        super(ExchangingOptimizer, self).add_param_group(param_group)
        self._names.update(names_by_position(self.param_groups, only=len(self.param_groups) - 1))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        super(ExchangingOptimizer, self).zero_grad(set_to_none)

    def weight_next(self, share: float) -> None:
        """Refused: Adasum does not weight ranks by their rows."""
        raise ConfigError(f"weight_next({share}) weights a mean, but the optimizer was made with op=Adasum.")

    def contribute_nothing(self) -> None:
        """Refused, see ``weight_next``."""
        raise ConfigError("contribute_nothing() is for weighted means, but the optimizer was made with op=Adasum.")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Nothing to set: gradients add up on the rank until ``step()`` in any case."""
        checked_passes(passes)

    def synchronize(self) -> None:
        """Nothing to wait for: gradients stay those of this rank, and may be clipped before ``step()`` as they are."""

    def close(self) -> None:
        """Nothing to take off."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refused: a step without the other ranks would leave them apart."""
        raise AssertionError("Adasum combines the steps in step() itself; there is nothing to skip.")
        yield
