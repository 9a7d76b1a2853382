"""The exchange of one optimizer's gradients: started during backward, finished before the step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from sparkhvd.comm import session
from sparkhvd.comm.buffers import Array, ReduceOp
from sparkhvd.comm.handle import Handle
from sparkhvd.errors import ConfigError, DeadlineExceededError, SparkHvdError
from sparkhvd.torch.tensors import Staged, buffer_of, stage


@dataclass(frozen=True)
class ExchangeSettings:
    """How gradients are combined.

    Attributes:
        op: the reduction of unweighted steps.
        passes: backward passes that are summed on the rank before the exchange.
        predivide: divides gradients before the reduction and multiplies the result, against overflow in small floats.
    """

    op: ReduceOp
    passes: int
    predivide: float


@dataclass(frozen=True, slots=True)
class _Pending:
    """A gradient on its way."""

    gradient: torch.Tensor
    staged: Staged
    handle: Handle[None]


@dataclass(slots=True, eq=False)
class _Tracked:
    """What the exchange knows of one parameter within a step."""

    name: str
    parameter: torch.Tensor
    hooks: list[RemovableHandle] = field(default_factory=list)
    passes: int = 0
    pending: _Pending | None = None
    has_gradient: bool = False


class GradientExchange:
    """Submits each gradient as soon as backward has accumulated it, and waits for all of them in ``synchronize()``.

    The hooks on the parameters hold only a weak reference to the exchange: they do nothing once its optimizer is gone.
    Backward may run hooks in one thread per device; each touches its own parameter's entry only.
    """

    def __init__(self, settings: ExchangeSettings) -> None:
        self._settings = settings
        self._tracked: dict[torch.Tensor, _Tracked] = {}
        self._share: float | None = None  # of the coming backward pass; None in an unweighted step
        self.synchronized = False

    def track(self, names: Mapping[torch.Tensor, str]) -> None:
        """Take up parameters, each under the name by which the ranks know its gradient."""
        for parameter, name in names.items():
            self._tracked[parameter] = _Tracked(name, parameter)
        self._attach()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for tracked in self._tracked.values():
            for hook in tracked.hooks:
                hook.remove()
            tracked.hooks.clear()

    def set_passes(self, passes: int) -> None:
        """Sum ``passes`` backward passes before the next exchanges."""
        self.require_idle("set_backward_passes_per_step() was called")
        self._settings = ExchangeSettings(self._settings.op, passes, self._settings.predivide)
        self.reset()

    def weight(self, share: float) -> None:
        """Multiply the gradients of the coming backward pass by ``share`` and sum over ranks instead of averaging."""
        if not math.isfinite(share) or not 0 <= share <= 1:
            raise ConfigError(f"A share of the global batch lies between 0 and 1, not {share}.")
        if self._settings.op is not ReduceOp.AVERAGE:
            raise ConfigError(f"Shares weight a mean, but the optimizer was made with op={self._settings.op}.")
        self._share = share
        self.synchronized = False
        self._attach()

    def skip_pass(self) -> None:
        """Count a backward pass to which this rank has nothing to add."""
        self.weight(0.0)
        for tracked in self._tracked.values():
            if tracked.parameter.requires_grad:
                self._count_pass(tracked)

    def synchronize(self) -> None:
        """Wait until every parameter's ``grad`` is the combined gradient of all ranks.

        What was not submitted yet is submitted now, as zeros where this rank has no gradient, so that ranks stay in
        step. A parameter for which no rank has a gradient ends without one, as it would in one process.
        """
        try:
            self._submit_rest()
            in_use = self._anywhere_in_use()
            _settle([*(tracked.pending.handle for tracked in self._tracked.values() if tracked.pending), in_use])
            for tracked, used in zip(self._tracked.values(), in_use.wait(), strict=True):
                self._finish(tracked)
                if not used:
                    tracked.parameter.grad = None
        finally:
            self.reset()
        self.synchronized = True

    def reset(self) -> None:
        """Forget the passes of the step so far."""
        for tracked in self._tracked.values():
            tracked.passes, tracked.pending, tracked.has_gradient = 0, None, False
        self._share = None
        self.synchronized = False
        self._attach()

    def require_idle(self, what_happened: str) -> None:
        """Raise ``AssertionError`` while gradients are on their way."""
        if any(tracked.pending for tracked in self._tracked.values()):
            raise AssertionError(
                f"{what_happened} after loss.backward() but before optimizer.step() or optimizer.synchronize(), "
                "while the gradients are on their way to the other ranks; call one of these first."
            )

    def _attach(self) -> None:
        """Put hooks on the parameters that need them by now: requires_grad may change between steps."""
        me = weakref.ref(self)
        for parameter, tracked in self._tracked.items():
            if parameter.requires_grad and not tracked.hooks:
                before, after = partial(_before_accumulation, me, tracked), partial(_after_accumulation, me, tracked)
                tracked.hooks = [
                    parameter.register_hook(before),  # type: ignore[no-untyped-call]
                    parameter.register_post_accumulate_grad_hook(after),  # type: ignore[no-untyped-call]
                ]

    def incoming(self, tracked: _Tracked, gradient: torch.Tensor) -> torch.Tensor | None:
        """What is accumulated in place of ``gradient``; None leaves it."""
        if tracked.pending is not None:
            raise AssertionError(
                f"The gradient of {tracked.name!r} was computed more than backward_passes_per_step="
                f"{self._settings.passes} times before step(); raise backward_passes_per_step to accumulate locally."
            )
        self.synchronized = False
        if self._share is None or self._settings.passes == 1:
            return None
        return gradient * self._share  # before the passes, which differ in their shares, are summed

    def accumulated(self, tracked: _Tracked) -> None:
        """Submit the gradient if this was the step's last pass."""
        tracked.has_gradient = True
        self._count_pass(tracked)

    def _count_pass(self, tracked: _Tracked) -> None:
        tracked.passes += 1
        if tracked.passes == self._settings.passes:
            self._submit(tracked)

    def _submit_rest(self) -> None:
        for tracked in self._tracked.values():
            if tracked.pending is None and tracked.parameter.requires_grad:
                self._submit(tracked)

    def _submit(self, tracked: _Tracked) -> None:
        parameter = tracked.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        else:
            tracked.has_gradient = True
        gradient = parameter.grad
        what = f"The gradient of {tracked.name!r}"
        staged = stage(gradient, what)
        buffer = buffer_of(staged.memory, what)
        # With several passes their shares are in the sum already.
        share = self._share if self._share is not None and self._settings.passes == 1 else 1.0
        predivide = self._settings.predivide
        handle = session.current().reduce_buffer(
            buffer,
            buffer,
            self._settings.op if self._share is None else ReduceOp.SUM,
            name=tracked.name,
            prescale=share / predivide,
            postscale=predivide,
        )
        tracked.pending = _Pending(gradient, staged, handle)

    def _anywhere_in_use(self) -> Handle[Array]:
        """Which parameters have a gradient on any rank."""
        flags = np.array([tracked.has_gradient for tracked in self._tracked.values()], np.uint8)
        first = next(iter(self._tracked.values())).name
        return session.current().allreduce_async(flags, ReduceOp.MAX, name=f"{first}.in_use", out=flags)

    def _finish(self, tracked: _Tracked) -> None:
        pending = tracked.pending
        if pending is None:
            return
        pending.staged.write_back()
        if tracked.parameter.grad is not pending.gradient:
            raise AssertionError(
                f"The grad of {tracked.name!r} was replaced or set to None between loss.backward() and "
                "optimizer.step(); call optimizer.synchronize() before changing gradients."
            )


def _settle(handles: Sequence[Handle[Array] | Handle[None]]) -> None:
    """Wait for all, then raise the first failure: what stayed in flight would be in the way of the next step."""
    failure: SparkHvdError | None = None
    for handle in handles:
        try:
            handle.wait(0.0 if isinstance(failure, DeadlineExceededError) else None)
        except SparkHvdError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _before_accumulation(
    exchange: weakref.ref[GradientExchange], tracked: _Tracked, gradient: torch.Tensor
) -> torch.Tensor | None:
    alive = exchange()
    return None if alive is None else alive.incoming(tracked, gradient)


def _after_accumulation(exchange: weakref.ref[GradientExchange], tracked: _Tracked, _parameter: torch.Tensor) -> None:
    alive = exchange()
    if alive is not None:
        alive.accumulated(tracked)
