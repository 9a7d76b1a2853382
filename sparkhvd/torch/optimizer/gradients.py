"""The exchange of one optimizer's gradients: started during backward, finished before the step."""

from __future__ import annotations

import dataclasses
import math
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions
from sparkhvd.comm.handle import Handle
from sparkhvd.errors import ConfigError, DeadlineExceededError, SparkHvdError
from sparkhvd.torch.ops.tensors import buffer_of
from sparkhvd.torch.ops.transfer import ExchangeSettings, Transfer, Weight, send, send_nothing


@dataclass(slots=True, eq=False)
class _Tracked:
    """What the exchange knows of one parameter within a step."""

    name: str
    parameter: torch.Tensor
    hooks: list[RemovableHandle] = field(default_factory=list)
    passes: int = 0
    transfer: Transfer | None = None
    group: list[_Tracked] = field(default_factory=list)  # those that are sent together with it, itself included

    @property
    def ready(self) -> bool:
        """Whether all passes of the step are done, or it has no part in them."""
        return self.passes >= 0 or not self.parameter.requires_grad


class GradientExchange:
    """Submits each gradient as soon as backward has accumulated it, and waits for all of them in ``synchronize()``.

    Beside the gradients the ranks reduce one small vector, of which parameters have a gradient, and of which layout. It
    is submitted right before the last gradient, with its dtype, operation and scale, so that it travels in the same
    fused buffer and costs no exchange of its own. From it a rank that lacks gradients learns which ones the others
    wait for; what no rank has a gradient for is not sent.

    The hooks on the parameters hold only a weak reference to the exchange: they do nothing once its optimizer is gone.
    """

    def __init__(self, settings: ExchangeSettings) -> None:
        self._settings = settings
        self._tracked: dict[torch.Tensor, _Tracked] = {}
        self._share: float | None = None  # of the coming backward pass; None in an unweighted step
        self._lock = threading.Lock()  # guards what a step changes: backward runs hooks in one thread per device
        self._unsent = 0  # parameters that backward still has to reach, as far as counted when the step began
        self._presence: Handle[None] | None = None
        self._flags = torch.empty(0)
        self.synchronized = False

    def track(self, names: Mapping[torch.Tensor, str]) -> None:
        """Take up parameters, each under the name by which the ranks know its gradient."""
        for parameter, name in names.items():
            tracked = _Tracked(name, parameter)
            tracked.group.append(tracked)
            self._tracked[parameter] = tracked
        self.reset()

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients are exchanged."""
        return list(self._tracked)

    def group(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        """Send the gradients of each group together, once all of them are there."""
        for members in groups:
            together = [self._tracked[parameter] for parameter in members]
            for tracked in together:
                tracked.group = together

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for tracked in self._tracked.values():
            for hook in tracked.hooks:
                hook.remove()
            tracked.hooks.clear()

    def set_passes(self, passes: int) -> None:
        """Sum ``passes`` backward passes before the next exchanges."""
        self.require_idle("set_backward_passes_per_step() was called")
        self._settings = dataclasses.replace(self._settings, passes=passes)
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
            if tracked.parameter.requires_grad and tracked.parameter.grad is not None:
                self.accumulated(tracked)

    def synchronize(self) -> None:
        """Wait until every parameter's ``grad`` is the combined gradient of all ranks.

        A gradient that was not submitted yet is submitted now. Where this rank has none and others have, it adds zeros.
        A parameter for which no rank has a gradient ends without one, as it would in one process.
        """
        try:
            with self._lock:
                for tracked in self._tracked.values():
                    parameter = tracked.parameter
                    if not tracked.transfer and parameter.requires_grad and parameter.grad is not None:
                        self._send(tracked)
                presence = self._presence or self._submit_presence(())
            try:
                self._join_the_others(presence)
            finally:
                self._receive_all(presence)
        finally:
            self.reset()
        self.synchronized = True

    def reset(self) -> None:
        """Forget the passes of the step so far."""
        for tracked in self._tracked.values():
            tracked.passes, tracked.transfer = -self._settings.passes, None
        self._presence = None
        self._share = None
        self.synchronized = False
        self._attach()

    def require_idle(self, what_happened: str) -> None:
        """Raise ``AssertionError`` while gradients are on their way."""
        if any(tracked.transfer for tracked in self._tracked.values()):
            raise AssertionError(
                f"{what_happened} after loss.backward() but before optimizer.step() or optimizer.synchronize(), "
                "while the gradients are on their way to the other ranks; call one of these first."
            )

    def incoming(self, tracked: _Tracked, gradient: torch.Tensor) -> torch.Tensor | None:
        """What is accumulated in place of ``gradient``; None leaves it."""
        if tracked.passes >= 0:
            raise AssertionError(
                f"The gradient of {tracked.name!r} was computed more than backward_passes_per_step="
                f"{self._settings.passes} times before step(); raise backward_passes_per_step to accumulate locally."
            )
        self.synchronized = False
        if self._share is None or self._settings.passes == 1:
            return None
        return gradient * self._share  # before the passes, which differ in their shares, are summed

    def accumulated(self, tracked: _Tracked) -> None:
        """Count a pass; after the last one submit the gradient, with those of its group once all are there."""
        with self._lock:
            tracked.passes += 1
            if tracked.passes == 0 and all(each.ready for each in tracked.group):
                for each in tracked.group:
                    if each.transfer is None and each.parameter.grad is not None:
                        self._send(each)

    def _attach(self) -> None:
        """Put hooks on the parameters that need them by now: requires_grad may change between steps."""
        me = weakref.ref(self)
        self._unsent = 0
        for parameter, tracked in self._tracked.items():
            if not parameter.requires_grad:
                continue
            self._unsent += tracked.transfer is None
            if not tracked.hooks:
                before, after = partial(_before_accumulation, me, tracked), partial(_after_accumulation, me, tracked)
                tracked.hooks = [
                    parameter.register_hook(before),  # type: ignore[no-untyped-call]
                    parameter.register_post_accumulate_grad_hook(after),  # type: ignore[no-untyped-call]
                ]

    def _weight(self) -> Weight:
        if self._share is None:
            return Weight(self._settings.op)
        # With several passes their shares are in the sum already.
        return Weight(ReduceOp.SUM, self._share if self._settings.passes == 1 else 1.0)

    def _send(self, tracked: _Tracked) -> None:
        self._unsent -= 1
        if self._unsent <= 0 and self._presence is None and self._is_last(tracked):
            self._submit_presence((tracked,))
        tracked.transfer = send(tracked.parameter, tracked.name, self._weight(), self._settings)

    def _is_last(self, tracked: _Tracked) -> bool:
        return all(
            each.transfer or each is tracked or not each.parameter.requires_grad for each in self._tracked.values()
        )

    def _submit_presence(self, about_to_go: Sequence[_Tracked]) -> Handle[None]:
        """Start to tell all ranks which dense and which sparse gradients this one has."""
        first = next(iter(self._tracked.values()))
        layouts = [self._layout(each, about_to_go) for each in self._tracked.values()]
        flags = [layout is torch.strided for layout in layouts] + [layout is torch.sparse_coo for layout in layouts]
        self._flags = torch.tensor(flags, dtype=self._settings.dtype_on_the_way(first.parameter.dtype))
        op = self._weight().op
        own = buffer_of(self._flags, "The vector of what is there")
        self._presence = session.current().reduce_buffer(
            own,
            own,
            Reduction(
                op if op in {ReduceOp.AVERAGE, ReduceOp.SUM} else ReduceOp.MAX, postscale=self._settings.predivide
            ),
            SubmitOptions(f"{first.name}.presence", self._settings.process_set),
        )
        return self._presence

    def _layout(self, tracked: _Tracked, about_to_go: Sequence[_Tracked]) -> torch.layout | None:
        if tracked.transfer is not None:
            return torch.sparse_coo if tracked.transfer.sparse else torch.strided
        gradient = tracked.parameter.grad
        if tracked not in about_to_go or gradient is None:
            return None
        return torch.strided if self._settings.sparse_as_dense else gradient.layout

    def _anywhere(self) -> list[tuple[bool, bool]]:
        """Whether any rank has a dense or a sparse gradient, for each parameter; once the vector has come."""
        found = self._flags.ne(0).tolist()
        return list(zip(found[: len(self._tracked)], found[len(self._tracked) :], strict=True))

    def _join_the_others(self, presence: Handle[None]) -> None:
        """Submit what this rank has nothing for and others wait for."""
        if all(tracked.transfer for tracked in self._tracked.values()):
            return
        presence.wait()
        for tracked, (dense, sparse) in zip(self._tracked.values(), self._anywhere(), strict=True):
            if tracked.transfer is None and (dense or sparse):
                tracked.transfer = send_nothing(
                    tracked.parameter, tracked.name, self._weight(), self._settings, as_sparse=not dense
                )

    def _receive_all(self, presence: Handle[None]) -> None:
        sent = [tracked for tracked in self._tracked.values() if tracked.transfer is not None]
        results = _settle([*(tracked.transfer.handle for tracked in sent if tracked.transfer), presence])
        for tracked, result in zip(sent, results, strict=False):
            _deliver(tracked, result)
        for tracked, (dense, sparse) in zip(self._tracked.values(), self._anywhere(), strict=True):
            if not (dense or sparse):
                tracked.parameter.grad = None


def _deliver(tracked: _Tracked, result: torch.Tensor | None) -> None:
    if tracked.transfer is None:
        return
    if tracked.parameter.grad is not tracked.transfer.gradient:
        raise AssertionError(
            f"The grad of {tracked.name!r} was replaced or set to None between loss.backward() and "
            "optimizer.step(); call optimizer.synchronize() before changing gradients."
        )
    if tracked.transfer.sparse:
        tracked.parameter.grad = result


def _settle(handles: Sequence[Handle[torch.Tensor] | Handle[None]]) -> list[torch.Tensor | None]:
    """Wait for all, then raise the first failure: what stayed in flight would be in the way of the next step."""
    failure: SparkHvdError | None = None
    results: list[torch.Tensor | None] = []
    for handle in handles:
        try:
            results.append(handle.wait(0.0 if isinstance(failure, DeadlineExceededError) else None))
        except SparkHvdError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return results


def _before_accumulation(
    exchange: weakref.ref[GradientExchange], tracked: _Tracked, gradient: torch.Tensor
) -> torch.Tensor | None:
    alive = exchange()
    return None if alive is None else alive.incoming(tracked, gradient)


def _after_accumulation(exchange: weakref.ref[GradientExchange], tracked: _Tracked, _parameter: torch.Tensor) -> None:
    alive = exchange()
    if alive is not None:
        alive.accumulated(tracked)
