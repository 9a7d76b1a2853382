"""Metrics of a Keras model over the rows of all ranks."""

from __future__ import annotations

import keras
import numpy as np
import numpy.typing as npt

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp

Logs = dict[str, float] | None  # the values that callbacks get, by metric


class MetricSums:
    """The variables of a model's metrics, as sums over all ranks.

    The results of the metrics are then exact, also of those that are not means (``AUC``, ``F1Score``). A metric with a
    variable whose ``aggregation`` is not a sum is left unchanged.

    Args:
        model: the compiled model, the same on all ranks.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._start: dict[int, npt.NDArray[np.float64]] = {}  # by id of the variable

    def begin(self) -> None:
        """Note the values at the start of an epoch or a validation: a metric without a reset begins with a sum."""
        self._start = {id(variable): _flat(variable) for variable in self._variables()}

    def sum_over_ranks(self, name: str) -> None:
        """Set the variables to their values at the start and what all ranks have added since; collective.

        Args:
            name: the name of the collective.
        """
        variables = self._variables()
        if not variables:
            return
        values = [_flat(variable) for variable in variables]
        starts = [
            self._start.get(id(variable), np.zeros(len(v))) for variable, v in zip(variables, values, strict=True)
        ]
        start = np.concatenate(starts)
        start[~np.isfinite(start)] = 0.0
        added = session.current().allreduce(np.concatenate(values) - start, ReduceOp.SUM, name=name)
        total = start + added.astype(np.float64)
        ends = np.cumsum([len(value) for value in values])[:-1]
        for variable, summed in zip(variables, np.split(total, ends), strict=True):
            variable.assign(
                summed.reshape(variable.shape).astype(np.asarray(keras.ops.convert_to_numpy(variable)).dtype)
            )

    def _variables(self) -> list[keras.Variable]:
        return [variable for metric in _metrics(self._model) if _is_sum(metric) for variable in metric.variables]


def _flat(variable: keras.Variable) -> npt.NDArray[np.float64]:
    return np.asarray(keras.ops.convert_to_numpy(variable)).reshape(-1).astype(np.float64)


def summed_results(model: keras.Model) -> dict[str, float]:
    """Return the results of the metrics in a model's attributes, after ``MetricSums.sum_over_ranks``.

    A user-defined step may report them beside other values, and Keras then logs what the step returned on this rank.
    """
    own = [m for m in model.metrics if m is not getattr(model, "_loss_tracker", None) and not hasattr(m, "metrics")]
    results = {
        metric.name: np.asarray(keras.ops.convert_to_numpy(metric.result())) for metric in own if _is_sum(metric)
    }
    return {name: float(result) for name, result in results.items() if result.shape == ()}


def _metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the metrics of a model, with those of containers."""
    return [inner for metric in model.metrics for inner in getattr(metric, "metrics", [metric])]


def _is_sum(metric: keras.metrics.Metric) -> bool:
    # Keras before 3.7 has sums only.
    return all(getattr(variable, "aggregation", "sum") == "sum" for variable in metric.variables)
