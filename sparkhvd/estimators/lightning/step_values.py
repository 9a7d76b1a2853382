"""Values that steps log without a reduction, so that each rank has its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from sparkhvd.comm import objects, session
from sparkhvd.errors import ParamError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

Value = torch.Tensor | int | float

# All reductions except the mean, by Lightning's names.
_REDUCTIONS: Mapping[str, Callable[[Iterable[float]], float]] = MappingProxyType({"sum": sum, "min": min, "max": max})


def monitored_names(trainer: Trainer) -> set[str]:
    """Return the names by which schedulers and callbacks decide."""
    callbacks = vars(trainer)["callbacks"]  # Lightning does not declare the attribute
    return {
        monitor
        for owner in (*trainer.lr_scheduler_configs, *callbacks)
        if isinstance(monitor := getattr(owner, "monitor", None), str)
    }


def refuse_metric_of_single_rank(name: str, value: Any, trainer: Trainer) -> None:
    """Refuse to decide by a torchmetrics metric that a step logs, if its value in a step covers one rank's rows.

    Args:
        name: of the value that is logged per step.
        value: a metric, or another value.
        trainer: has the schedulers and callbacks.

    Raises:
        ParamError: one of them monitors the metric.
    """
    if getattr(value, "dist_sync_on_step", True) or session.current().world.size == 1:
        return
    if monitors := {name, f"{name}_step"} & monitored_names(trainer):
        raise ParamError(
            f"A scheduler or callback monitors {min(monitors)!r}, a {type(value).__name__} that is logged per step. "
            "Its value in a step covers the rows of one rank, so the ranks would decide differently. Create it with "
            "dist_sync_on_step=True, or log it with on_step=False, on_epoch=True."
        )


@dataclass
class StepValues:
    """The latest values of this rank.

    Attributes:
        latest: by name, the number of the batch, the value, and the number of rows that it is the mean of.
        reductions: by name, how to reduce the value over the ranks: ``mean``, ``sum``, ``min`` or ``max``.
    """

    latest: dict[str, tuple[int, Value, int]] = field(default_factory=dict)
    reductions: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, batch: int, value: Value, rows: int, reduction: str) -> None:
        """Add the value of a batch."""
        self.latest[name] = batch, value.detach() if isinstance(value, torch.Tensor) else value, rows
        self.reductions[name] = reduction

    def before(self, name: str, value: Value) -> Value:
        """Return the latest value to log again if the rank has no rows; ``value`` if there is none."""
        return self.latest[name][1] if name in self.latest else value

    def agreed(self) -> dict[str, float]:
        """Return the reduction of each value over the ranks with rows in its last batch; collective."""
        own = {
            name: (batch, float(value), rows, self.reductions[name])
            for name, (batch, value, rows) in self.latest.items()
            if rows
        }
        ranks = objects.allgather_object(session.current(), own, name="values of steps")
        names = sorted({name for of_rank in ranks for name in of_rank})
        return {name: _reduced_in_last([of_rank[name] for of_rank in ranks if name in of_rank]) for name in names}


def _reduced_in_last(values: list[tuple[int, float, int, str]]) -> float:
    """Return the reduction of the values in the last of their batches."""
    last = max(batch for batch, *_ in values)
    in_last = [(value, rows) for batch, value, rows, _ in values if batch == last]
    reduction = _REDUCTIONS.get(values[0][-1])
    if reduction is not None:
        return reduction(value for value, _ in in_last)
    return sum(value * rows for value, rows in in_last) / sum(rows for _, rows in in_last)
