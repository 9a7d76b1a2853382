"""The Keras callbacks, with Horovod's arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sparkhvd.keras.callbacks as _ours
from sparkhvd.comm import interface

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class LearningRateScheduleCallback(_ours.LearningRateScheduleCallback):
    """See ``sparkhvd.keras``. A numeric ``multiplier`` multiplies the rate once per epoch after ``start_epoch``."""

    def __init__(  # noqa: PLR0917  the arguments are Horovod's
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        factor = multiplier if callable(multiplier) else _Power(multiplier, start_epoch)
        super().__init__(initial_lr, factor, start_epoch, end_epoch, staircase, momentum_correction, steps_per_epoch)


class LearningRateWarmupCallback(_ours.LearningRateWarmupCallback):
    """See ``sparkhvd.keras``. With ``verbose``, rank 0 prints a line when the warmup ends."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(initial_lr, warmup_epochs, momentum_correction, steps_per_epoch, verbose)

    def _report(self, line: str) -> None:
        if interface.rank() == 0:
            print(f"\n{line}", flush=True)  # noqa: T201  on a line of its own, after Keras' progress bar


@dataclass(frozen=True)
class _Power:
    """The multiplier of an exponential decay; picklable, for estimators."""

    base: float
    start_epoch: int

    def __call__(self, epoch: float) -> float:
        return float(self.base ** (epoch - self.start_epoch))


class BroadcastGlobalVariablesCallback(_ours.BroadcastGlobalVariablesCallback):
    """See ``sparkhvd.keras``. Each rank keeps its own ``local_variables``. ``device`` has no effect."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:  # noqa: ARG002
        super().__init__(root_rank)
        self._local_ids = {id(variable) for variable in local_variables or ()}

    def register_local_var(self, var: Any) -> None:
        """Let each rank keep its own value of a variable."""
        self._local_ids.add(id(var))

    def _variables(self) -> list[Any]:
        return [variable for variable in super()._variables() if id(variable) not in self._local_ids]


class MetricAverageCallback(_ours.MetricAverageCallback):
    """See ``sparkhvd.keras``. ``device`` has no effect."""

    def __init__(self, device: str = "") -> None:  # noqa: ARG002
        super().__init__()


class BestModelCheckpoint(_ours.BestModelCheckpoint):
    """See ``sparkhvd.keras``. It takes no ``filepath``, because an estimator sets it."""

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, mode: str = "auto", save_freq: str | int = "epoch"
    ) -> None:
        super().__init__(monitor=monitor, verbose=verbose, mode=mode, save_freq=save_freq)
