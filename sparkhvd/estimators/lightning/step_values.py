"""Values that steps log without a reduction, so that each rank has its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sparkhvd.comm import objects, session

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

Value = torch.Tensor | int | float


def monitored_names(trainer: Trainer) -> set[str]:
    """Return the names by which schedulers and callbacks decide."""
    callbacks = vars(trainer)["callbacks"]  # Lightning does not declare the attribute
    return {
        monitor
        for owner in (*trainer.lr_scheduler_configs, *callbacks)
        if isinstance(monitor := getattr(owner, "monitor", None), str)
    }


@dataclass
class StepValues:
    """The latest values of this rank.

    Attributes:
        latest: by name, the number of the batch, the value, and the number of rows that it is the mean of.
    """

    latest: dict[str, tuple[int, Value, int]] = field(default_factory=dict)

    def add(self, name: str, batch: int, value: Value, rows: int) -> None:
        """Add the value of a batch."""
        self.latest[name] = batch, value.detach() if isinstance(value, torch.Tensor) else value, rows

    def before(self, name: str, value: Value) -> Value:
        """Return the latest value to log again if the rank has no rows; ``value`` if there is none."""
        return self.latest[name][1] if name in self.latest else value

    def agreed(self) -> dict[str, float]:
        """Return the mean of each value over the rows of its last batch on all ranks; collective."""
        own = {name: (batch, float(value), rows) for name, (batch, value, rows) in self.latest.items() if rows}
        ranks = objects.allgather_object(session.current(), own, name="values of steps")
        names = sorted({name for of_rank in ranks for name in of_rank})
        return {name: _mean_of_last([of_rank[name] for of_rank in ranks if name in of_rank]) for name in names}


def _mean_of_last(values: list[tuple[int, float, int]]) -> float:
    last = max(batch for batch, _, _ in values)
    counted = [(value, rows) for batch, value, rows in values if batch == last]
    return sum(value * rows for value, rows in counted) / sum(rows for _, rows in counted)
