"""The Keras callbacks, with Horovod's arguments."""

from __future__ import annotations

from typing import Any

import sparkhvd.keras.callbacks as _ours

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

LearningRateScheduleCallback = _ours.LearningRateScheduleCallback
LearningRateWarmupCallback = _ours.LearningRateWarmupCallback


class BroadcastGlobalVariablesCallback(_ours.BroadcastGlobalVariablesCallback):
    """See ``sparkhvd.keras``; ``local_variables`` keep each rank's values, and ``device`` has no effect."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:  # noqa: ARG002
        super().__init__(root_rank)
        self._local_ids = {id(variable) for variable in local_variables or ()}

    def _variables(self) -> list[Any]:
        return [variable for variable in super()._variables() if id(variable) not in self._local_ids]


class MetricAverageCallback(_ours.MetricAverageCallback):
    """See ``sparkhvd.keras``; ``device`` has no effect."""

    def __init__(self, device: str = "") -> None:  # noqa: ARG002
        super().__init__()


class BestModelCheckpoint(_ours.BestModelCheckpoint):
    """See ``sparkhvd.keras``; an estimator sets the file."""

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, mode: str = "auto", save_freq: str | int = "epoch"
    ) -> None:
        super().__init__(monitor=monitor, verbose=verbose, mode=mode, save_freq=save_freq)
