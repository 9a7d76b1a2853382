"""The optimizer for Adasum: every rank takes its own step, then the ranks combine their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions
from sparkhvd.comm.process_sets import ProcessSet, exchanges_with
from sparkhvd.errors import ConfigError
from sparkhvd.torch.compression import Compressor, NoneCompressor
from sparkhvd.torch.ops.calls import Call, first
from sparkhvd.torch.ops.reductions import Allreduce
from sparkhvd.torch.optimizer.exchange import ExchangingOptimizer, NotCopied
from sparkhvd.torch.optimizer.parameters import checked_passes, names_by_position


@dataclass(frozen=True)
class DeltaSettings:
    """How the ranks combine their steps.

    Attributes:
        compression: compresses a step for transfer.
        process_set: the ranks that take part; all ranks by default.
    """

    compression: Compressor = NoneCompressor
    process_set: ProcessSet | None = None


class DeltaOptimizer(ExchangingOptimizer):
    """A mixin that ``DistributedOptimizer(op=Adasum)`` adds to the class of the optimizer that it wraps.

    Adasum (Maleki et al., 2020) adds the orthogonal parts of the ranks' steps and averages their common parts, so that
    the learning rate of one rank suits any number of ranks. The mixin combines steps rather than gradients, because the
    step of an optimizer with moments is not a linear function of the gradient.
    """

    _names: dict[torch.Tensor, str]
    _settings: DeltaSettings = NotCopied()  # type: ignore[assignment]
    _moving: set[torch.Tensor]

    def begin(self, names: Mapping[torch.Tensor, str], settings: DeltaSettings) -> None:
        """Register the parameters with the names of their operations, which are equal on all ranks."""
        self._patch_step_function()  # so that post-hooks run after the steps are combined
        self._names, self._settings = dict(names), settings
        self._moving = {parameter for parameter in names if parameter.requires_grad}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with this rank's own gradients, then replace it with the Adasum of all ranks' steps."""
        if not exchanges_with(self._settings.process_set):
            return self._own_step(closure)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        # A parameter that was frozen during training may still move, because of its last gradient or its momentum.
        self._moving.update(parameter for parameter in parameters if parameter.requires_grad)
        trained = [(parameter, self._names[parameter]) for parameter in parameters if parameter in self._moving]
        starts = [parameter.detach().clone() for parameter, _ in trained]
        result = self._own_step(closure)
        with torch.no_grad():
            deltas = [parameter - start for (parameter, _), start in zip(trained, starts, strict=True)]
            handles = [
                self._adasum(delta, name).start(in_place=False)
                for delta, (_, name) in zip(deltas, trained, strict=True)
            ]
            for handle, (parameter, _), start in zip(handles, trained, starts, strict=True):
                parameter.copy_(start.add_(handle.wait()))
        return result

    def _own_step(self, closure: Callable[[], Any] | None) -> Any:
        """Take this rank's step without the step hooks of the optimizer."""
        step = super(ExchangingOptimizer, type(self)).step
        return (step.__wrapped__ if getattr(step, "hooked", False) else step)(self, closure)  # type: ignore[attr-defined]

    def _adasum(self, delta: torch.Tensor, name: str) -> Call[torch.Tensor]:
        options = SubmitOptions(name, self._settings.process_set)
        return Call(Allreduce((delta,), Reduction(ReduceOp.ADASUM), options, self._settings.compression), first)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, and name the parameters by their positions."""
        super(ExchangingOptimizer, self).add_param_group(param_group)
        self._names.update(names_by_position(self.param_groups, only=len(self.param_groups) - 1))

    def drop_param_groups(self, first: int) -> None:
        """Remove the parameter groups from index ``first`` on."""
        for group in self.param_groups[first:]:
            for parameter in group["params"]:
                del self._names[parameter]
                self._moving.discard(parameter)
        del self.param_groups[first:]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        super(ExchangingOptimizer, self).zero_grad(set_to_none)

    def weight_next(self, share: float) -> None:
        """Raise ``ConfigError``: Adasum does not weight ranks by their rows."""
        raise ConfigError(f"weight_next({share}) needs op=Average, but the optimizer was created with op=Adasum.")

    def contribute_nothing(self) -> None:
        """Raise ``ConfigError``: Adasum does not weight ranks by their rows."""
        raise ConfigError("contribute_nothing() needs op=Average, but the optimizer was created with op=Adasum.")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Check ``passes`` and change nothing: with Adasum, gradients always accumulate locally until ``step()``."""
        checked_passes(passes)

    def synchronize(self) -> None:
        """Do nothing: gradients stay on the rank, so they can be clipped before ``step()``."""

    def before_unscaling(self) -> None:
        """Do nothing: gradients stay on the rank."""

    def agree_on_skipping(self, infinite: torch.Tensor) -> None:
        """Set ``infinite`` to its maximum over all ranks, so that they skip the same steps. This is a collective."""
        if exchanges_with(self._settings.process_set):
            options = SubmitOptions(f"{next(iter(self._names.values()))}.infinite", self._settings.process_set)
            call = Call(Allreduce((infinite,), Reduction(ReduceOp.MAX), options, NoneCompressor), first)
            call.start(in_place=True).wait()

    def abandon_step(self) -> None:
        """Do nothing: nothing is exchanged between ``backward()`` and ``step()``."""

    def close(self) -> None:
        """Do nothing: there are no hooks to remove."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise ``AssertionError``: ``step()`` itself combines the steps, and ranks that skip this would diverge."""
        raise AssertionError(
            "skip_synchronize() cannot be used with op=Adasum, because step() itself combines the steps. Call step() "
            "without skip_synchronize()."
        )
        yield
