"""Learning rate schedules."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sparkhvd.errors import ParamError
from sparkhvd.estimators.params.policies import metric_value
from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.torch.checkpoint.safe_state import plain_numbers

logger = logging.getLogger(__name__)

Scheduler = torch.optim.lr_scheduler.LRScheduler

# The keys of a parameter group that hold learning rates.
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
_OMITTED = object()  # a value that a checkpoint cannot hold
# Schedulers with learning rates of their own, which scale_lr cannot scale.
_RATE_OWNERS = ("CyclicLR", "OneCycleLR", "SWALR")


@dataclass(frozen=True)
class LRSchedule:
    """A learning rate scheduler and the time of its steps.

    Attributes:
        scheduler: a function that creates the scheduler from the optimizer on every rank; or a scheduler of the
            estimator's optimizer.
        every: ``epoch``, or ``step`` to advance after every optimizer step.
        monitor: the metric for ``ReduceLROnPlateau``; names of validation metrics start with ``val_``.

    Examples:
        >>> LRSchedule(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000), every="step")
        ... # doctest: +SKIP
    """

    scheduler: Callable[[torch.optim.Optimizer], Scheduler] | Scheduler
    every: Literal["epoch", "step"] = "epoch"
    monitor: str | None = None

    def __post_init__(self) -> None:
        if self.every not in {"epoch", "step"}:
            raise ParamError(f"LRSchedule(every={self.every!r}): every must be 'epoch' or 'step'.")
        if not callable(self.scheduler) and not isinstance(self.scheduler, Scheduler):
            raise ParamError(
                f"LRSchedule(scheduler={self.scheduler!r}): pass a scheduler from torch.optim.lr_scheduler, or a "
                "function that creates one from the optimizer."
            )


def lr_schedule(name: str, value: object) -> LRSchedule:
    """Return an ``LRSchedule``; a scheduler, or a function that creates one, steps every epoch."""
    if isinstance(value, LRSchedule):
        return value
    if isinstance(value, Scheduler) or callable(value):
        return LRSchedule(value)
    raise ParamError(
        f"{name}={value!r} must be an LRSchedule, a scheduler from torch.optim.lr_scheduler, or a function that "
        "creates one from the optimizer."
    )


class RunningSchedule:
    """The schedule of a fit on one rank.

    Args:
        schedule: the user's schedule; None never changes the rate.
        optimizer: the optimizer of the training, with the learning rate already scaled.
        lr_scale: the factor of this scaling.
    """

    def __init__(self, schedule: LRSchedule | None, optimizer: torch.optim.Optimizer, lr_scale: float) -> None:
        self._warned = False
        self._every = None if schedule is None else schedule.every
        self._monitor = None if schedule is None else schedule.monitor
        self._scheduler = None if schedule is None else _create_scheduler(schedule, optimizer, lr_scale)

    def after_step(self) -> None:
        """Advance a schedule of steps after an optimizer step."""
        if self._every == "step":
            self._advance(())

    def after_epoch(self, record: EpochRecord) -> None:
        """Advance a schedule of epochs at the end of an epoch."""
        if self._every == "epoch":
            self._advance(() if self._monitor is None else (metric_value(record, self._monitor),))

    def state(self) -> dict[str, Any] | None:
        """Return the state for ``restore``."""
        if self._scheduler is None:
            return None
        omitted: list[str] = []
        state: dict[str, Any] = _plain_part(plain_numbers(self._scheduler.state_dict()), "", omitted)
        if omitted and not self._warned:
            self._warned = True
            logger.warning(
                "The checkpoint omits these attributes of %s: %s. A checkpoint may hold only tensors, numbers, "
                "strings, lists and dicts; a resumed run starts with new values of the others.",
                type(self._scheduler).__name__,
                ", ".join(omitted),
            )
        return state

    def restore(self, state: dict[str, Any] | None, factor: float) -> None:
        """Resume from ``state``, with learning rates multiplied by ``factor``."""
        if self._scheduler is not None and state is not None:
            self._scheduler.load_state_dict(state)
            scale_schedule(self._scheduler, factor)

    def _advance(self, arguments: tuple[float, ...]) -> None:
        if self._scheduler is None:
            return
        with warnings.catch_warnings():
            # The scheduler counts the steps of its own optimizer, but the distributed optimizer takes the steps.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*", category=UserWarning)
            step: Callable[..., object] = self._scheduler.step
            step(*arguments)  # ReduceLROnPlateau takes the metric


def check_schedule(schedule: LRSchedule | None, optimizer: torch.optim.Optimizer, *, scaled: bool) -> None:
    """Check a schedule on the driver by creating its scheduler for ``optimizer``, which is a copy.

    Raises:
        ParamError: the schedule lacks an argument, or ``scale_lr`` cannot scale it.
    """
    try:
        RunningSchedule(schedule, optimizer, 2.0 if scaled else 1.0)
    except ParamError:
        raise
    except Exception as error:  # noqa: BLE001  (a user's function may need a rank)
        logger.debug("The learning rate schedule was not checked on the driver: %s", error)


def _create_scheduler(schedule: LRSchedule, optimizer: torch.optim.Optimizer, lr_scale: float) -> Scheduler:
    is_scheduler = isinstance(schedule.scheduler, Scheduler)
    scheduler = schedule.scheduler if isinstance(schedule.scheduler, Scheduler) else schedule.scheduler(optimizer)
    if not isinstance(scheduler, Scheduler):
        raise ParamError(
            f"lr_scheduler returned a {type(scheduler).__name__}; it must return a scheduler from "
            "torch.optim.lr_scheduler."
        )
    is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if is_plateau and (schedule.monitor is None or schedule.every == "step"):
        raise ParamError(
            "ReduceLROnPlateau reads a metric after every epoch; pass LRSchedule(scheduler, monitor='val_loss'), "
            "without every='step'."
        )
    if schedule.monitor is not None and not is_plateau:
        raise ParamError(
            f"LRSchedule(monitor={schedule.monitor!r}) is for ReduceLROnPlateau; {type(scheduler).__name__} reads no "
            "metric. Leave monitor out."
        )
    if lr_scale != 1.0:
        # A function may compute its own minimum from the optimizer's rate, which is already scaled.
        refuse_own_rates(
            scheduler,
            lambda part: type(part).__name__ in _RATE_OWNERS or (not is_scheduler and _has_minimum(part)),
        )
    if is_scheduler:
        scale_schedule(scheduler, lr_scale)
    return scheduler


def _has_minimum(scheduler: object) -> bool:
    return any([getattr(scheduler, "eta_min", 0.0), *getattr(scheduler, "min_lrs", ())])


def refuse_own_rates(scheduler: object, has_own: Callable[[object], bool]) -> None:
    """Refuse schedulers with learning rates of their own that ``scale_lr`` cannot scale.

    Args:
        scheduler: the scheduler; schedulers that it is composed of are refused, too.
        has_own: returns whether a scheduler has such learning rates.

    Raises:
        ParamError: the scheduler has such learning rates.
    """
    names = [type(part).__name__ for part in parts_of(scheduler) if has_own(part)]
    if names:
        raise ParamError(
            f"scale_lr=True cannot scale the learning rates that {names[0]} was created with. Scale them yourself and "
            "leave scale_lr out."
        )


def parts_of(scheduler: Any) -> list[Any]:
    """Return a scheduler and the schedulers that it is composed of."""
    return [scheduler, *(part for child in getattr(scheduler, "_schedulers", ()) for part in parts_of(child))]


def repeat_initial_step(scheduler: Any) -> None:
    """Repeat a scheduler's initial step on an optimizer whose learning rates have changed after that step."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return  # it adjusts the current rate
    parts = getattr(scheduler, "_schedulers", None)
    if parts is None:
        scheduler.last_epoch -= 1
        scheduler._initial_step()  # noqa: SLF001  (torch has no public way)
    elif isinstance(scheduler, torch.optim.lr_scheduler.SequentialLR):
        for group in scheduler.optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        repeat_initial_step(parts[0])
    else:
        for part in parts:
            repeat_initial_step(part)


def scale_schedule(scheduler: Any, factor: float) -> None:
    """Multiply the learning rates that a scheduler and its parts keep."""
    if factor == 1.0:
        return
    for part in parts_of(scheduler):
        for name in ("base_lrs", "max_lrs", "min_lrs", "_last_lr"):
            if hasattr(part, name):
                setattr(part, name, [rate * factor for rate in getattr(part, name)])
        for name in ("eta_min", "default_min_lr"):
            if (rate := getattr(part, name, None)) is not None:  # default_min_lr is None if each group has its own
                setattr(part, name, rate * factor)


def _plain_part(value: Any, name: str, omitted: list[str]) -> Any:
    """Return the part of a scheduler's state that ``torch.load(..., weights_only=True)`` can load.

    Args:
        value: the state, or a part of it.
        name: the path to ``value``.
        omitted: receives the paths to the values that cannot be loaded, except functions, which are not state.
    """
    if isinstance(value, dict):
        parts = {key: _plain_part(item, f"{name}.{key}" if name else str(key), omitted) for key, item in value.items()}
        kept = {key: part for key, part in parts.items() if part is not _OMITTED}
        return Counter(kept) if isinstance(value, Counter) else kept
    if isinstance(value, list | tuple):
        items = [_plain_part(item, f"{name}[{index}]", omitted) for index, item in enumerate(value)]
        if any(item is _OMITTED for item in items):
            return _OMITTED
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, bool | int | float | str | torch.Tensor):
        return value
    if not callable(value):
        omitted.append(f"{name} ({type(value).__name__})")
    return _OMITTED
