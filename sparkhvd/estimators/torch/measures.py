"""Loss and metrics of an epoch, batch by batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from sparkhvd.comm import objects
from sparkhvd.comm.communicator import Communicator
from sparkhvd.estimators.torch.objective import Metric, Objective


class Measures:
    """Sums over this rank's rows; and metrics of torchmetrics, which keep a state of their own.

    Args:
        objective: what is measured.
        device: where outputs and labels are.
    """

    def __init__(self, objective: Objective, device: torch.device) -> None:
        self._objective = objective
        self._names = [name for name in objective.names() if name not in {m.name for m in objective.stateful()}]
        self._rows = 0
        self._totals: dict[str, float] = {}
        self._stateful = [(metric, _fresh(metric, device)) for metric in objective.stateful()]

    def add(
        self, loss: torch.Tensor, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], rows: int
    ) -> float:
        """Take up a batch; returns its loss."""
        values = self._objective.measure(loss, outputs, labels)
        self._rows += rows
        for name, value in values.items():
            self._totals[name] = self._totals.get(name, 0.0) + value * rows
        with torch.no_grad():
            for metric, state in self._stateful:
                state.update(outputs[metric.output].detach(), labels[metric.output])
        return values["loss"]

    def sums(self) -> dict[str, tuple[float, int]]:
        """Sum and rows by name, without torchmetrics'."""
        return {name: (self._totals.get(name, 0.0), self._rows) for name in self._names}

    def report(self, communicator: Communicator) -> dict[str, tuple[float, int]]:
        """All metrics as an epoch's report has them; collective where there are torchmetrics'."""
        found = self.sums()
        for metric, state in self._stateful:
            value = merged(state, communicator, metric.name)
            # The same on every rank: one of them reports it.
            found[metric.name] = (value, 1) if communicator.world.rank == 0 else (0.0, 0)
        return {name: found[name] for name in self._objective.names()}


def merged(state: Any, communicator: Communicator, name: str) -> float:
    """The value of a metric of torchmetrics over the rows of all ranks; NaN without rows. Collective."""
    mine = {key: _on_cpu(value) for key, value in state.metric_state.items()} if state.update_called else None
    gathered = objects.allgather_object(communicator, mine, name=f"state of metric {name}")
    states = [found for found in gathered if found is not None]
    if not states:
        return float("nan")
    total = copy.deepcopy(state)
    for attribute, reduction in total._reductions.items():  # noqa: SLF001  (its own way to merge needs torch.distributed)
        parts = [found[attribute] for found in states]
        if isinstance(parts[0], list):
            setattr(total, attribute, [tensor.to(state.device) for part in parts for tensor in part])
        else:
            stacked = torch.stack([part.to(state.device) for part in parts])
            setattr(total, attribute, stacked if reduction is None else reduction(stacked))
    total._update_count = len(states)  # noqa: SLF001
    total._computed = None  # noqa: SLF001
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # such as: no positive samples
        return float(total.compute())


def _on_cpu(value: Any) -> Any:
    return [tensor.cpu() for tensor in value] if isinstance(value, list) else value.cpu()


def _fresh(metric: Metric, device: torch.device) -> Any:
    state: Any = copy.deepcopy(metric.function)
    state.reset()
    return state.to(device)
