"""The exchange of one optimizer's gradients, which starts during backward and ends before the step."""

from __future__ import annotations

import dataclasses
import math
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.process_sets import exchanges_with
from sparkhvd.errors import ConfigError, DeadlineExceededError, SparkHvdError
from sparkhvd.torch.ops.tensors import buffer_of
from sparkhvd.torch.ops.transfer import ExchangeSettings, Transfer, Weight, send, send_zeros


@dataclass(slots=True, eq=False, weakref_slot=True)
class _TrackedParameter:
    """The state of one parameter within a step."""

    name: str
    parameter: torch.Tensor
    accumulation: Node | None = None  # the node of autograd that adds to ``grad``; set with the hooks
    hooks: list[RemovableHandle] = field(default_factory=list)
    passes: int = 0  # counts the passes of the step from -backward_passes_per_step up; 0 after the last
    transfer: Transfer | None = None
    group: list[_TrackedParameter] = field(default_factory=list)  # sent together; includes the parameter itself

    @property
    def ready(self) -> bool:
        """Return whether all passes of the step have reached the parameter, or the parameter is frozen."""
        return self.passes >= 0 or not self.parameter.requires_grad


class GradientExchange:
    """Submits each gradient as soon as backward has accumulated it, and waits for all of them in ``synchronize()``.

    In addition to the gradients, the ranks reduce one small presence vector. It marks the parameters with a dense
    gradient and those with a sparse gradient. A rank without a gradient for some parameter learns from the vector
    whether other ranks have submitted one. No rank sends a parameter for which all ranks lack a gradient.

    The presence vector is submitted right before the last gradient. If possible, it has the dtype, the operation and
    the postscale of the gradients, and is sent in the fusion buffer of the last one, without a separate exchange.

    The hooks on the parameters hold a weak reference to the exchange. Once its optimizer is deleted, they do nothing.

    Args:
        settings: how to send gradients.
        with_frozen: whether to exchange the last gradients of frozen parameters, which an optimizer still applies.
    """

    def __init__(self, settings: ExchangeSettings, *, with_frozen: bool = True) -> None:
        self._settings = settings
        self._with_frozen = with_frozen
        self._tracked: dict[torch.Tensor, _TrackedParameter] = {}
        self._share: float | None = None  # the weight of the next backward pass; None in an unweighted step
        self._share_waits = False  # whether no backward pass has used the share yet
        self._lock = threading.Lock()  # guards the state of a step: backward runs hooks in one thread per device
        self._unsent = 0  # parameters not sent yet, counted at the beginning of the step
        self._presence: Handle[None] | None = None
        self._flags = torch.empty(0)
        self.synchronized = False

    def track(self, names: Mapping[torch.Tensor, str]) -> None:
        """Register parameters under the operation names of their gradients, which are equal on all ranks."""
        for parameter, name in names.items():
            tracked = _TrackedParameter(name, parameter)
            tracked.group.append(tracked)
            self._tracked[parameter] = tracked
        # The presence vector has the order of the names, because the order of the parameters may differ between ranks.
        self._tracked = dict(sorted(self._tracked.items(), key=lambda entry: entry[1].name))
        self.reset()

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Stop exchanging the gradients of these parameters."""
        for parameter in parameters:
            for hook in self._tracked.pop(parameter).hooks:
                hook.remove()
        self.reset()

    def tracks(self, parameter: torch.Tensor) -> bool:
        """Return whether the gradient of a parameter is exchanged."""
        return parameter in self._tracked

    def group(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        """Send the gradients of each group together, once all of them are computed."""
        for members in groups:
            together = [self._tracked[parameter] for parameter in members]
            for tracked in together:
                tracked.group = together

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for tracked in self._tracked.values():
            for hook in tracked.hooks:
                hook.remove()
            tracked.hooks.clear()

    def set_passes(self, passes: int) -> None:
        """Accumulate the gradients of ``passes`` backward passes before each exchange."""
        self.require_idle("set_backward_passes_per_step() was called")
        self._settings = dataclasses.replace(self._settings, passes=passes)
        self.reset()

    def weight(self, share: float) -> None:
        """Multiply the gradients of the next backward pass by ``share``; sum over the ranks instead of averaging."""
        if not math.isfinite(share) or not 0 <= share <= 1:
            raise ConfigError(f"share must be a fraction of the global batch, between 0 and 1, got {share}.")
        if self._settings.op is not ReduceOp.AVERAGE:
            raise ConfigError(
                f"weight_next() and contribute_nothing() need op=Average, but the optimizer was created with "
                f"op={self._settings.op}."
            )
        self._share, self._share_waits = share, True
        self.synchronized = False
        self._attach()

    def skip_pass(self) -> None:
        """Count a backward pass in which this rank has no rows."""
        self.weight(0.0)
        for tracked in self._tracked.values():
            if tracked.parameter.requires_grad and tracked.parameter.grad is not None:
                self.accumulated(tracked)

    def synchronize(self) -> None:
        """Wait until every parameter's ``grad`` is the combined gradient of all ranks.

        Submits the gradients that were not submitted yet. If only other ranks have a gradient for a parameter, this
        rank submits zeros. If no rank has one, ``grad`` becomes None, as in a single process. A rank outside the
        process set keeps its own gradients.
        """
        if not exchanges_with(self._settings.process_set):
            self.reset()
            self.synchronized = True
            return
        try:
            with self._lock:
                for tracked in self._tracked.values():
                    parameter = tracked.parameter
                    if not tracked.transfer and parameter.grad is not None and self._takes_part(parameter):
                        self._send(tracked)
                presence = self._presence or self._submit_presence(())
            try:
                self._send_missing(presence)
            finally:
                self._receive_all(presence)
        finally:
            self.reset()
        self.synchronized = True

    def restart(self) -> None:
        """Reset the state of the step, except for a share that the next backward pass will use."""
        share = self._share if self._share_waits else None
        self.reset()
        self._share, self._share_waits = share, share is not None

    def reset(self) -> None:
        """Reset the state of the step."""
        for tracked in self._tracked.values():
            tracked.passes, tracked.transfer = -self._settings.passes, None
        self._presence = None
        self._share, self._share_waits = None, False
        self.synchronized = False
        self._attach()

    def require_idle(self, event: str) -> None:
        """Raise ``AssertionError`` while gradients are being exchanged."""
        if any(tracked.transfer for tracked in self._tracked.values()):
            raise AssertionError(
                f"{event} after loss.backward() but before optimizer.step() or optimizer.synchronize(), "
                "while the gradients are being exchanged with the other ranks; call one of the two first."
            )

    def incoming(self, tracked: _TrackedParameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient to accumulate instead of ``gradient``; None keeps it."""
        if not _is_accumulated(tracked):
            return None
        if tracked.passes >= 0:
            raise AssertionError(
                f"The gradient of {tracked.name!r} was computed more than backward_passes_per_step="
                f"{self._settings.passes} times before step(); raise backward_passes_per_step to accumulate locally."
            )
        self.synchronized = self._share_waits = False
        if self._share is None or self._settings.passes == 1 or not exchanges_with(self._settings.process_set):
            return None
        return gradient * self._share  # passes differ in their shares, so they are scaled before they are summed

    def accumulated(self, tracked: _TrackedParameter) -> None:
        """Count a pass; after the last one, submit the gradients of the group once all of them are computed."""
        if tracked.parameter.grad is None:
            return  # a user's hook ran before this one, and has taken a step and reset the gradient
        with self._lock:
            tracked.passes += 1
            if not exchanges_with(self._settings.process_set):
                return
            if tracked.passes == 0 and all(member.ready for member in tracked.group):
                for member in tracked.group:
                    if member.transfer is None and member.parameter.grad is not None:
                        self._send(member)

    def _attach(self) -> None:
        """Count the parameters to send, and add missing hooks: ``requires_grad`` may change between steps."""
        exchange = weakref.ref(self)
        self._unsent = 0
        for parameter, tracked in self._tracked.items():
            if not parameter.requires_grad:
                continue
            self._unsent += tracked.transfer is None
            if not tracked.hooks:
                tracked.accumulation = _accumulation_of(parameter)
                # A strong reference would keep the parameter forever: the node of autograd holds it where the garbage
                # collector cannot see it.
                before = partial(_before_accumulation, exchange, weakref.ref(tracked))
                after = partial(_after_accumulation, exchange, weakref.ref(tracked))
                tracked.hooks = [
                    parameter.register_hook(before),  # type: ignore[no-untyped-call]
                    parameter.register_post_accumulate_grad_hook(after),  # type: ignore[no-untyped-call]
                ]

    def _weight(self, tracked: _TrackedParameter | None = None) -> Weight:
        if self._share is None:
            return Weight(self._settings.op)
        if self._settings.passes == 1:
            return Weight(ReduceOp.SUM, self._share)
        # Gradients that were accumulated over several passes already contain the shares. A gradient that the ranks have
        # kept from an earlier step contains none. It is equal on all ranks, so it is averaged.
        is_kept = tracked is not None and tracked.passes == -self._settings.passes
        ranks = session.current().channel(self._settings.process_set).size
        return Weight(ReduceOp.SUM, 1.0 / ranks if is_kept else 1.0)

    def _send(self, tracked: _TrackedParameter) -> None:
        self._unsent -= 1
        try:
            if self._unsent <= 0 and self._presence is None and self._is_last(tracked):
                self._submit_presence((tracked,))
            tracked.transfer = send(tracked.parameter, tracked.name, self._weight(tracked), self._settings)
        except ConfigError as error:
            if "already in flight" not in str(error):
                raise
            raise ConfigError(
                f"Another optimizer is exchanging a gradient named {tracked.name!r}. Pass named_parameters= to each "
                "DistributedOptimizer, with names that are unique among all optimizers."
            ) from error

    def _is_last(self, tracked: _TrackedParameter) -> bool:
        return all(
            other.transfer or other is tracked or not other.parameter.requires_grad for other in self._tracked.values()
        )

    def _submit_presence(self, about_to_send: Sequence[_TrackedParameter]) -> Handle[None]:
        """Submit the presence vector: flags for the dense and the sparse gradients of this rank."""
        first = next(iter(self._tracked.values()))
        layouts = [self._layout(tracked, about_to_send) for tracked in self._tracked.values()]
        flags = [layout is torch.strided for layout in layouts] + [layout is torch.sparse_coo for layout in layouts]
        # Infinity stays infinite under every factor. In float16, small factors would turn 1 into 0.
        values = [math.inf if flag else 0.0 for flag in flags]
        # A complex gradient is refused by its own name, so the vector that precedes it is real.
        self._flags = torch.tensor(values, dtype=self._settings.wire_dtype(first.parameter.dtype.to_real()))
        op = self._weight().op
        own = buffer_of(self._flags, "The presence vector of the gradients")
        self._presence = session.current().reduce_buffer(
            own,
            own,
            Reduction(
                op if op in {ReduceOp.AVERAGE, ReduceOp.SUM} else ReduceOp.MAX, postscale=self._settings.predivide
            ),
            SubmitOptions(f"{first.name}.presence", self._settings.process_set),
        )
        return self._presence

    def _layout(self, tracked: _TrackedParameter, about_to_send: Sequence[_TrackedParameter]) -> torch.layout | None:
        if tracked.transfer is not None:
            return torch.sparse_coo if tracked.transfer.sparse else torch.strided
        gradient = tracked.parameter.grad
        is_sent_later = self._with_frozen and not tracked.parameter.requires_grad
        if gradient is None or (tracked not in about_to_send and not is_sent_later):
            return None
        return torch.strided if self._settings.sparse_as_dense else gradient.layout

    def _present(self) -> list[tuple[bool, bool]]:
        """Return for each parameter whether any rank has a dense gradient, and whether any has a sparse one.

        Valid after the reduction.
        """
        flags = self._flags.ne(0).tolist()
        return list(zip(flags[: len(self._tracked)], flags[len(self._tracked) :], strict=True))

    def _send_missing(self, presence: Handle[None]) -> None:
        """Submit zeros for the parameters for which only other ranks have a gradient."""
        if all(tracked.transfer for tracked in self._tracked.values()):
            return
        presence.wait()
        for tracked, (dense, sparse) in zip(self._tracked.values(), self._present(), strict=True):
            if tracked.transfer is None and (dense or sparse):
                tracked.transfer = send_zeros(
                    tracked.parameter, tracked.name, self._weight(), self._settings, as_sparse=not dense
                )

    def _receive_all(self, presence: Handle[None]) -> None:
        sent = [tracked for tracked in self._tracked.values() if tracked.transfer is not None]
        disturbed = [tracked.name for tracked in sent if tracked.transfer and tracked.transfer.was_disturbed]
        results = _wait_for_all([*(tracked.transfer.handle for tracked in sent if tracked.transfer), presence])
        if disturbed:
            raise AssertionError(
                f"The grad of {disturbed[0]!r} was changed in place between loss.backward() and optimizer.step(), "
                "while it was being exchanged; call optimizer.synchronize() before changing gradients, for example "
                "before clip_grad_norm_()."
            )
        for tracked, result in zip(sent, results, strict=False):
            _deliver(tracked, result)
        for tracked, (dense, sparse) in zip(self._tracked.values(), self._present(), strict=True):
            if not (dense or sparse) and self._takes_part(tracked.parameter):
                tracked.parameter.grad = None

    def _takes_part(self, parameter: torch.Tensor) -> bool:
        return parameter.requires_grad or self._with_frozen


def _accumulation_of(parameter: torch.Tensor) -> Node:
    """Return the node of autograd that adds to the parameter's ``grad``."""
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr, return-value]


def _is_accumulated(tracked: _TrackedParameter) -> bool:
    """Return whether the running backward pass adds to ``grad``; ``torch.autograd.grad`` only returns gradients."""
    if tracked.accumulation is None:
        return True
    runs = torch._C._will_engine_execute_node  # noqa: SLF001  (no public name)
    try:
        if runs(tracked.accumulation):
            return True
        tracked.accumulation = _accumulation_of(tracked.parameter)  # ``model.to()`` may have replaced it
        return bool(runs(tracked.accumulation))
    except RuntimeError:  # PyTorch raises it in torch.autograd.grad
        return False


def _deliver(tracked: _TrackedParameter, result: torch.Tensor | None) -> None:
    if tracked.transfer is None:
        return
    if tracked.parameter.grad is not tracked.transfer.gradient:
        raise AssertionError(
            f"The grad of {tracked.name!r} was replaced or set to None between loss.backward() and "
            "optimizer.step(); call optimizer.synchronize() before changing gradients."
        )
    if tracked.transfer.sparse:
        tracked.parameter.grad = result


def _wait_for_all(handles: Sequence[Handle[torch.Tensor] | Handle[None]]) -> list[torch.Tensor | None]:
    """Wait for all handles, then raise the first failure: operations in flight would disturb the next step."""
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
    exchange: weakref.ref[GradientExchange], parameter: weakref.ref[_TrackedParameter], gradient: torch.Tensor
) -> torch.Tensor | None:
    alive, tracked = exchange(), parameter()
    return None if alive is None or tracked is None else alive.incoming(tracked, gradient)


def _after_accumulation(
    exchange: weakref.ref[GradientExchange], parameter: weakref.ref[_TrackedParameter], _tensor: torch.Tensor
) -> None:
    alive, tracked = exchange(), parameter()
    if alive is not None and tracked is not None:
        alive.accumulated(tracked)
