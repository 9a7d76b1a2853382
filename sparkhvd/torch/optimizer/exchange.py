"""The mixin with which ``DistributedOptimizer`` extends the class of the optimizer that it wraps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sparkhvd.errors import ConfigError
from sparkhvd.torch.optimizer.gradients import GradientExchange
from sparkhvd.torch.optimizer.parameters import checked_passes, names_by_position


class NotCopied:
    """An attribute that copies of an optimizer lack, so that they cannot train without an exchange."""

    def __get__(self, optimizer: object, kind: type) -> Any:
        if optimizer is None:
            return self
        raise ConfigError(
            "This is a copy of an optimizer that exchanges gradients. It cannot do so itself, because the hooks are on "
            "the parameters of the original model. Make a new optimizer for the copied parameters, load the "
            "state_dict() of this one into it, and wrap it with DistributedOptimizer."
        )


class ExchangingOptimizer(torch.optim.Optimizer):
    """A mixin that ``DistributedOptimizer`` adds to the class of the optimizer that it wraps."""

    _exchange: GradientExchange = NotCopied()  # type: ignore[assignment]
    _skip: bool = False

    def weight_next(self, share: float) -> None:
        """Weight the next backward pass by this rank's share of the global batch.

        The gradients of that pass, of the *mean* loss over this rank's rows, are multiplied by ``share`` and summed
        over the ranks instead of averaged, so that the step's gradient is the mean over all rows of the global batch.
        Call it on every rank before every backward pass of a step. With several passes per step, the shares of all
        passes of all ranks sum to 1. A rank without rows calls ``contribute_nothing()`` instead of its backward pass.

        With ``SyncBatchNorm``, do not call it: the gradients of layers before it would be wrong, because its backward
        pass adds up the gradients of all ranks before they are multiplied. Multiply the loss by
        ``share * hvd.size()`` instead, also on ranks without rows.

        Args:
            share: rows of this pass / rows of the whole step over all ranks, from 0 to 1.

        Examples:
            >>> optimizer.zero_grad()
            >>> if batch.rows:
            ...     optimizer.weight_next(batch.share)
            ...     loss(model(batch.features), batch.labels).backward()
            ... else:
            ...     optimizer.contribute_nothing()
            >>> optimizer.step()
        """
        self._exchange.require_idle("weight_next() was called")
        self._exchange.weight(share)

    def contribute_nothing(self) -> None:
        """Take part in a weighted step without rows, as one backward pass whose gradients are zero."""
        self._exchange.require_idle("contribute_nothing() was called")
        self._exchange.skip_pass()

    def synchronize(self) -> None:
        """Wait until every ``grad`` holds the combined gradient, for example to clip it before ``step()``."""
        self._exchange.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make ``step()`` in this block use the gradients without an exchange, after an explicit ``synchronize()``."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum ``passes`` backward passes on the rank before gradients are exchanged."""
        self._exchange.set_passes(checked_passes(passes))

    def abandon_step(self) -> None:
        """Drop the exchange of an unfinished step after ranks were lost; the gradients keep their current values."""
        self._exchange.reset()

    def close(self) -> None:
        """Remove the hooks from the parameters; the optimizer must not be used afterwards."""
        self._exchange.close()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients of all ranks, then take the step of the wrapped optimizer.

        Args:
            closure: recomputes the loss and its gradients, which are exchanged afterwards.
        """
        if self._skip:
            self._exchange.require_idle("step() was called inside skip_synchronize()")
            result = super().step(closure)
        elif closure is None:
            self._synchronize_once()
            result = super().step()
        else:
            result = super().step(self._with_synchronization(closure))
        self._exchange.synchronized = False
        return result

    # The step of the wrapped optimizer runs the hooks of users and of the profiler, after the exchange.
    step.hooked = True  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the ``param_groups`` and the ``state`` that schedulers and the original optimizer share."""
        groups, states = self.param_groups, self.state
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        loaded_states = dict(self.state)
        states.clear()
        states.update(loaded_states)
        self.param_groups, self.state = groups, states

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients. The share of a ``weight_next()`` just before still holds for the next backward pass.

        Raises:
            AssertionError: between ``backward()`` and ``step()``, while the gradients are being exchanged.
        """
        self._exchange.require_idle("optimizer.zero_grad() was called")
        self._exchange.restart()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose gradients are named by their positions."""
        super().add_param_group(param_group)
        self._exchange.track(names_by_position(self.param_groups, only=len(self.param_groups) - 1))

    def drop_param_groups(self, first: int) -> None:
        """Remove the parameter groups from index ``first`` on, and no longer exchange their gradients."""
        self._exchange.forget(parameter for group in self.param_groups[first:] for parameter in group["params"])
        del self.param_groups[first:]

    def before_unscaling(self) -> None:
        """Wait for the gradients, because a ``GradScaler`` is about to divide them in place."""
        self._synchronize_once()

    def agree_on_skipping(self, infinite: torch.Tensor) -> None:
        """Make ``infinite`` positive on all ranks if it is positive on one.

        Nothing needs to be done here, because all ranks have the same gradients.

        Args:
            infinite: scalar, positive if gradients of this rank are infinite or NaN; a ``GradScaler`` skips the step.
        """

    def _synchronize_once(self) -> None:
        if not self._exchange.synchronized:
            self._exchange.synchronize()

    def _with_synchronization(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self._synchronize_once()
            return loss

        return evaluate


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes, except those of the exchange and the ``step`` that a scheduler has replaced."""
    beside = {"step", *ExchangingOptimizer.__annotations__}
    return {name: value for name, value in vars(optimizer).items() if name not in beside}
