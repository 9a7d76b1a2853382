"""Loss and metrics of an epoch, accumulated batch by batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparkhvd.comm import objects
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.communicator import Communicator
from sparkhvd.estimators.torch.losses.divisors import LossFactors, batch_divisors, counted_rows
from sparkhvd.estimators.torch.losses.objective import Metric, Objective, is_stateful


class EpochMetrics:
    """Accumulates the loss and metrics over this rank's rows; torchmetrics keep their own state.

    Args:
        objective: the losses and metrics.
        device: the device of outputs and labels.
        validating: whether batches are added by ``add_validation`` instead of ``add``.
    """

    def __init__(self, objective: Objective, device: torch.device, *, validating: bool = False) -> None:
        self._objective = objective
        self._names = [name for name in objective.names() if name not in {m.name for m in objective.stateful()}]
        self._rows = 0
        self._rows_of_loss = 0
        self._totals: dict[str, float] = {}
        self._stateful = [(metric, _reset_copy(metric, device)) for metric in objective.stateful()]
        # Per loss: the sum of divisor times loss, and the sum of the divisors.
        self._counted = np.zeros((len(objective.losses), 2)) if validating else None

    def add(
        self,
        loss: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
        rows: int,
        factors: LossFactors = None,
    ) -> float:
        """Add a training batch and return its loss, which was computed with these factors."""
        values = self._objective.measure(loss, outputs, labels)
        self._rows_of_loss += counted_rows(rows, factors)
        self._add(values, outputs, labels, rows)
        return values["loss"]

    def add_validation(
        self, parts: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], rows: int
    ) -> None:
        """Add a validation batch; the loss of every output is weighted by its divisor."""
        if self._counted is None:
            raise AssertionError("add_validation() needs validating=True")
        for index, (part, count) in enumerate(zip(parts, batch_divisors(self._objective, labels, rows), strict=True)):
            if count:
                self._counted[index] += (float(part) * count, count)
        self._rows_of_loss += rows
        self._add(self._objective.measure(torch.zeros(()), outputs, labels), outputs, labels, rows)

    def _add(
        self,
        values: Mapping[str, float],
        outputs: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
        rows: int,
    ) -> None:
        self._rows += rows
        for name, value in values.items():
            self._totals[name] = self._totals.get(name, 0.0) + value * rows
        with torch.no_grad():
            for metric, state in self._stateful:
                state.update(outputs[metric.output].detach(), labels[metric.output])

    def _validation_loss(self, counted: npt.NDArray[np.float64], communicator: Communicator) -> tuple[float, int]:
        """Return the loss over the validation rows of all ranks, as one sample of rank 0; collective."""
        totals = communicator.allreduce(counted, ReduceOp.SUM, name="losses of the validation")
        if communicator.world.rank != 0:
            return 0.0, 0
        return weighted_mean_loss(self._objective.weights, totals.astype(np.float64)), 1

    def sums(self) -> dict[str, tuple[float, int]]:
        """Return sum and number of rows by name, without torchmetrics."""
        rows = {"loss": self._rows_of_loss}
        return {name: (self._totals.get(name, 0.0), rows.get(name, self._rows)) for name in self._names}

    def report(self, communicator: Communicator) -> dict[str, tuple[float, int]]:
        """Return all metrics in the form of an epoch report; collective."""
        metrics = self.sums()
        if self._counted is not None:
            metrics["loss"] = self._validation_loss(self._counted, communicator)
        for metric, state in self._stateful:
            value = merge_states(state, communicator, metric.name)
            # The value is the same on every rank, so only rank 0 reports it.
            metrics[metric.name] = (value, 1) if communicator.world.rank == 0 else (0.0, 0)
        return {name: metrics[name] for name in self._objective.names()}


def weighted_mean_loss(weights: Sequence[float], totals: npt.NDArray[np.float64]) -> float:
    """Return the weighted sum of the mean losses; NaN if a loss has a divisor of 0.

    Args:
        weights: one per loss.
        totals: per loss the sum of divisor times loss, and the sum of the divisors.
    """
    means = [float(total / count) if count else float("nan") for total, count in totals]
    return sum(weight * mean for weight, mean in zip(weights, means, strict=True))


def merge_states(state: Any, communicator: Communicator, name: str) -> float:
    """Return the value of a torchmetrics metric over the rows of all ranks; NaN without rows. Collective.

    Metrics that are composed of others (sums, wrappers) keep their state in their parts, so each part is merged alone.
    """
    mine = [_state(part) for part in _parts(state)]
    gathered = objects.allgather_object(communicator, mine, name=f"state of metric {name}")
    if not any(known is not None for states in gathered for known in states):
        return float("nan")
    total = copy.deepcopy(state)
    for part, states in zip(_parts(total), zip(*gathered, strict=True), strict=True):
        _merge(part, [known for known in states if known is not None])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # for example: no positive samples
        return float(total.compute())


def _parts(metric: Any) -> list[Any]:
    """Return the metric and its parts, in the same order on every rank."""
    return [part for part in metric.modules() if is_stateful(part) and hasattr(part, "metric_state")]


def _state(metric: Any) -> dict[str, Any] | None:
    """Return a metric's own state on this rank; None if it has seen no rows."""
    return {key: _on_cpu(value) for key, value in metric.metric_state.items()} if metric.update_called else None


def _merge(total: Any, states: Sequence[dict[str, Any]]) -> None:
    total._update_count = len(states)  # noqa: SLF001
    total._computed = None  # noqa: SLF001
    if not states:
        return
    for attribute, reduction in total._reductions.items():  # noqa: SLF001  (its public sync needs torch.distributed)
        parts = [state[attribute] for state in states]
        if isinstance(parts[0], list):
            setattr(total, attribute, [tensor.to(total.device) for part in parts for tensor in part])
        else:
            stacked = torch.stack([part.to(total.device) for part in parts])
            setattr(total, attribute, stacked if reduction is None else reduction(stacked))


def _on_cpu(value: Any) -> Any:
    return [tensor.cpu() for tensor in value] if isinstance(value, list) else value.cpu()


def _reset_copy(metric: Metric, device: torch.device) -> Any:
    state: Any = copy.deepcopy(metric.function)
    state.reset()
    return state.to(device)
