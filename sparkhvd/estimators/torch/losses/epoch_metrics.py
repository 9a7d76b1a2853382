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
from sparkhvd.estimators.torch.losses.metric_states import States, fits, from_bytes, merge_into, states_of, to_bytes
from sparkhvd.estimators.torch.losses.objective import Metric, Objective


class EpochMetrics:
    """Accumulates the loss and metrics over this rank's rows; torchmetrics keep their own state.

    Args:
        objective: the losses and metrics.
        device: the device of outputs and labels.
        validating: whether batches are added by ``add_validation`` instead of ``add``.
        earlier: results of ``state`` from the part of the epoch before an interruption, which this rank takes over.
    """

    def __init__(
        self,
        objective: Objective,
        device: torch.device,
        *,
        validating: bool = False,
        earlier: Sequence[bytes] = (),
    ) -> None:
        self._objective = objective
        self._names = [name for name in objective.names() if name not in {m.name for m in objective.stateful()}]
        self._rows = 0
        self._rows_of_loss = 0
        self._totals: dict[str, float] = {}
        self._stateful = [(metric, _reset_copy(metric, device)) for metric in objective.stateful()]
        loaded: list[dict[str, list[States]]] = [from_bytes(state) for state in earlier]
        self._earlier = {
            metric.name: [states for known in loaded for states in known.get(metric.name, ()) if fits(states, state)]
            for metric, state in self._stateful
        }
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
        """Return the loss over the validation rows of all ranks; only rank 0 reports it. Collective."""
        totals = communicator.allreduce(counted, ReduceOp.SUM, name="losses of the validation")
        if communicator.world.rank != 0:
            return 0.0, 0
        return weighted_mean_loss(self._objective.weights, totals.astype(np.float64)), 1

    def sums(self) -> dict[str, tuple[float, int]]:
        """Return sum and number of rows by name, without torchmetrics."""
        rows = {"loss": self._rows_of_loss}
        return {name: (self._totals.get(name, 0.0), rows.get(name, self._rows)) for name in self._names}

    def state(self) -> bytes:
        """Return the states of torchmetrics, including the states that this rank took over; empty without any."""
        if not self._stateful:
            return b""
        return to_bytes({metric.name: self._states(metric.name, state) for metric, state in self._stateful})

    def _states(self, name: str, state: Any) -> list[States]:
        return [states_of(state), *self._earlier[name]]

    def report(self, communicator: Communicator) -> dict[str, tuple[float, int]]:
        """Return all metrics in the form of an epoch report; collective."""
        metrics = self.sums()
        if self._counted is not None:
            metrics["loss"] = self._validation_loss(self._counted, communicator)
        for metric, state in self._stateful:
            value = _value_over_ranks(state, self._states(metric.name, state), communicator, metric.name)
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


def _value_over_ranks(metric: Any, own: list[States], communicator: Communicator, name: str) -> float:
    """Return the value of a torchmetrics metric over the rows of all ranks; NaN without rows. Collective.

    Args:
        metric: the metric.
        own: its states on this rank.
        communicator: the communicator of all ranks.
        name: the name of the metric.
    """
    gathered = objects.allgather_object(communicator, own, name=f"state of metric {name}")
    all_states = [states for rank_states in gathered for states in rank_states]
    if not any(state is not None for states in all_states for state in states):
        return float("nan")
    total = copy.deepcopy(metric)
    merge_into(total, all_states)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # for example: no positive samples
        return float(total.compute())


def _reset_copy(metric: Metric, device: torch.device) -> Any:
    state: Any = copy.deepcopy(metric.function)
    state.reset()
    return state.to(device)
