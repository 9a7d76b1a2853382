"""Learning rate schedules."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from sparkhvd.errors import ParamError
from sparkhvd.estimators.params.policies import measured
from sparkhvd.estimators.reports import EpochRecord

logger = logging.getLogger(__name__)

Scheduler = torch.optim.lr_scheduler.LRScheduler

# The numbers of a parameter group that are learning rates.
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
# Schedulers with learning rates of their own, which scale_lr cannot know.
_OWN_RATES = ("CyclicLR", "OneCycleLR", "ReduceLROnPlateau")


@dataclass(frozen=True)
class LRSchedule:
    """A learning rate scheduler, and when it takes a step.

    Attributes:
        scheduler: makes the scheduler from the optimizer, on every rank; or one made from the estimator's optimizer.
        every: ``epoch``, or ``step`` for after every optimizer step.
        monitor: for ``ReduceLROnPlateau``: the metric that it gets, ``val_`` before those of the validation.

    Example:
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


def a_schedule(name: str, value: Any) -> LRSchedule:
    """An ``LRSchedule``, or what becomes one that takes a step every epoch."""
    if isinstance(value, LRSchedule):
        return value
    if isinstance(value, Scheduler) or callable(value):
        return LRSchedule(value)
    raise ParamError(
        f"{name}={value!r} must be an LRSchedule, a scheduler from torch.optim.lr_scheduler, or a function that "
        "creates one from the optimizer."
    )


class RunningSchedule:
    """The schedule of a training on one rank.

    Args:
        schedule: what the user asked for; None never changes the rate.
        optimizer: what it is made for, after its learning rate was scaled.
        lr_scale: by how much.
    """

    def __init__(self, schedule: LRSchedule | None, optimizer: torch.optim.Optimizer, lr_scale: float) -> None:
        self._every = None if schedule is None else schedule.every
        self._monitor = None if schedule is None else schedule.monitor
        self._scheduler = None if schedule is None else _made(schedule, optimizer, lr_scale)

    def after_step(self) -> None:
        """An optimizer step was taken."""
        if self._every == "step":
            self._advance(())

    def after_epoch(self, record: EpochRecord) -> None:
        """An epoch ended."""
        if self._every == "epoch":
            self._advance(() if self._monitor is None else (measured(record, self._monitor),))

    def state(self) -> dict[str, Any] | None:
        """What ``restore`` takes."""
        if self._scheduler is None:
            return None
        return {name: value for name, value in self._scheduler.state_dict().items() if _is_plain(value)}

    def restore(self, state: dict[str, Any] | None, factor: float) -> None:
        """Go on from ``state``, with learning rates ``factor`` times as high."""
        if self._scheduler is not None and state is not None:
            self._scheduler.load_state_dict(state)
            scale_schedule(self._scheduler, factor)

    def _advance(self, arguments: tuple[float, ...]) -> None:
        if self._scheduler is None:
            return
        with warnings.catch_warnings():
            # It looks for the step of the optimizer that it was made with, while its distributed form takes the steps.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*", category=UserWarning)
            cast("Any", self._scheduler).step(*arguments)  # of ReduceLROnPlateau: the metric


def check_schedule(schedule: LRSchedule | None, optimizer: torch.optim.Optimizer, *, scaled: bool) -> None:
    """Refuse, on the driver, a schedule that could not run; it is made from ``optimizer``, a copy.

    Raises:
        ParamError: it lacks what it needs, or ``scale_lr`` cannot scale it.
    """
    try:
        RunningSchedule(schedule, optimizer, 2.0 if scaled else 1.0)
    except ParamError:
        raise
    except Exception as error:  # noqa: BLE001  (a function of the user's may need a rank)
        logger.debug("The learning rate schedule was not tried here: %s", error)


def _made(schedule: LRSchedule, optimizer: torch.optim.Optimizer, lr_scale: float) -> Scheduler:
    given = isinstance(schedule.scheduler, Scheduler)
    scheduler = schedule.scheduler if given else cast("Any", schedule.scheduler)(optimizer)
    if not isinstance(scheduler, Scheduler):
        raise ParamError(
            f"lr_scheduler returned a {type(scheduler).__name__}; it must return a scheduler from "
            "torch.optim.lr_scheduler."
        )
    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if plateau and (schedule.monitor is None or schedule.every == "step"):
        raise ParamError(
            "ReduceLROnPlateau reads a metric after every epoch; pass LRSchedule(scheduler, monitor='val_loss'), "
            "without every='step'."
        )
    if schedule.monitor is not None and not plateau:
        raise ParamError(
            f"LRSchedule(monitor={schedule.monitor!r}) is for ReduceLROnPlateau; {type(scheduler).__name__} reads no "
            "metric. Leave monitor out."
        )
    own = [type(part).__name__ for part in parts_of(scheduler) if type(part).__name__ in _OWN_RATES]
    if lr_scale != 1.0 and own:
        raise ParamError(
            f"scale_lr=True cannot scale the learning rates that {own[0]} was created with. Scale them yourself and "
            "leave scale_lr out."
        )
    if given:
        scale_schedule(scheduler, lr_scale)
    return scheduler


def parts_of(scheduler: Any) -> list[Any]:
    """A scheduler and those that it is made of."""
    return [scheduler, *(part for child in getattr(scheduler, "_schedulers", ()) for part in parts_of(child))]


def begin_anew(scheduler: Any) -> None:
    """Let a scheduler do again what it did when it was made, on an optimizer whose learning rates were set since."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return  # it changes the rate that it finds
    parts = getattr(scheduler, "_schedulers", None)
    if parts is None:
        scheduler.last_epoch -= 1
        scheduler._initial_step()  # noqa: SLF001  (torch has no public way)
    elif isinstance(scheduler, torch.optim.lr_scheduler.SequentialLR):
        for group in scheduler.optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        begin_anew(parts[0])
    else:
        for part in parts:
            begin_anew(part)


def scale_schedule(scheduler: Any, factor: float) -> None:
    """Multiply what a scheduler, and those that it is made of, compute learning rates from."""
    if factor == 1.0:
        return
    for part in parts_of(scheduler):
        for name in ("base_lrs", "max_lrs", "_last_lr"):
            if hasattr(part, name):
                setattr(part, name, [rate * factor for rate in getattr(part, name)])


def _is_plain(value: Any) -> bool:
    """Whether a file that runs no code can hold it."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)
