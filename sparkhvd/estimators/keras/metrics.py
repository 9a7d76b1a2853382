"""Metrics of a Keras model over the rows of all ranks."""

from __future__ import annotations

import keras
import numpy as np

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp

Logs = dict[str, float] | None  # the values that callbacks get, by metric


def sum_over_ranks(model: keras.Model, name: str) -> None:
    """Sum the variables of the model's metrics over all ranks; collective.

    Their results are then exact, also for metrics that are not means (``AUC``, ``F1Score``). A metric with a variable
    whose ``aggregation`` is not a sum is left unchanged.

    Args:
        model: the compiled model, the same on all ranks.
        name: the name of the collective.
    """
    variables = [variable for metric in _metrics(model) if _is_sum(metric) for variable in metric.variables]
    values = [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in variables]
    if not values:
        return
    flat = np.concatenate([value.reshape(-1).astype(np.float64) for value in values])
    total = session.current().allreduce(flat, ReduceOp.SUM, name=name)
    ends = np.cumsum([value.size for value in values])[:-1]
    for variable, value, summed in zip(variables, values, np.split(total, ends), strict=True):
        variable.assign(summed.reshape(value.shape).astype(value.dtype))


def summed_results(model: keras.Model) -> dict[str, float]:
    """Return the results of the metrics in a model's attributes, after ``sum_over_ranks``.

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
