"""Metrics of a Keras model over the rows of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras.src.models.functional import Functional  # not exported

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.estimators.keras.checkpoint.arrays import arrays_from_bytes, arrays_to_bytes

Logs = dict[str, float] | None  # the values that callbacks get, by metric


class MetricSums:
    """The variables of a model's metrics, as sums over all ranks.

    The results of the metrics are then exact, even for metrics that are not means (``AUC``, ``F1Score``). A metric with
    a variable whose ``aggregation`` is not a sum is left unchanged.

    Args:
        model: the compiled model, the same on all ranks.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._start: dict[int, npt.NDArray[np.float64]] = {}  # by id of the variable
        self._earlier: list[dict[str, npt.NDArray[np.generic]]] = []

    def begin(self, earlier: Sequence[bytes] = ()) -> None:
        """Record the values at the start of an epoch or a validation; a metric that is not reset keeps its sum.

        Args:
            earlier: results of ``state`` from the part of the epoch before an interruption, which this rank takes over.
        """
        self._start = {id(variable): _flat(variable) for variable in self._variables().values()}
        self._earlier = [arrays_from_bytes(state) for state in earlier]

    def cover(self, logs: Mapping[str, object]) -> bool:
        """Return whether the variables determine all values of ``logs``, as Keras' own training step reports them."""
        return all(map(_is_sum, _metrics(self._model))) and logs.keys() == self._model.get_metrics_result().keys()

    def state(self) -> bytes:
        """Return what this rank has added to the variables since the start, including the states that it took over."""
        return arrays_to_bytes(self._added())

    def sum_over_ranks(self, name: str) -> None:
        """Set the variables to their values at the start plus the additions of all ranks; collective.

        Args:
            name: the name of the collective.
        """
        variables, added = self._variables(), self._added()
        if not variables:
            return
        sums = session.current().allreduce(np.concatenate(list(added.values())), ReduceOp.SUM, name=name)
        ends = np.cumsum([len(value) for value in added.values()])[:-1]
        for variable, added_by_all in zip(variables.values(), np.split(sums.astype(np.float64), ends), strict=True):
            total = (self._start_of(variable) + added_by_all).reshape(variable.shape)
            variable.assign(total.astype(np.asarray(keras.ops.convert_to_numpy(variable)).dtype))

    def _added(self) -> dict[str, npt.NDArray[np.float64]]:
        added = {key: _flat(variable) - self._start_of(variable) for key, variable in self._variables().items()}
        for earlier in self._earlier:
            for key in added.keys() & earlier.keys():
                added[key] = added[key] + earlier[key].astype(np.float64)
        return added

    def _start_of(self, variable: keras.Variable) -> npt.NDArray[np.float64]:
        start = self._start.get(id(variable), np.zeros(1))
        return np.where(np.isfinite(start), start, 0.0)

    def _variables(self) -> dict[str, keras.Variable]:
        """Return the variables by keys that are equal on all ranks and in a resumed run; Keras numbers their names."""
        variables = [variable for metric in _metrics(self._model) if _is_sum(metric) for variable in metric.variables]
        return {f"{index} {tuple(variable.shape)}": variable for index, variable in enumerate(variables)}


def _flat(variable: keras.Variable) -> npt.NDArray[np.float64]:
    return np.asarray(keras.ops.convert_to_numpy(variable)).reshape(-1).astype(np.float64)


def summed_results(model: keras.Model) -> dict[str, float]:
    """Return the results of the metrics in a model's attributes, after ``MetricSums.sum_over_ranks``.

    A user-defined step may report other values, in which case Keras logs the values that the step returned.
    """
    own = [m for m in model.metrics if m is not getattr(model, "_loss_tracker", None) and not hasattr(m, "metrics")]
    results = {
        metric.name: np.asarray(keras.ops.convert_to_numpy(metric.result())) for metric in own if _is_sum(metric)
    }
    return {name: float(result.item()) for name, result in results.items() if result.size == 1}


def as_number(value: object) -> float:
    """Return a value of the logs, which may be an array with one element, as a number."""
    return float(np.asarray(keras.ops.convert_to_numpy(value)).item())


def is_number(value: object) -> bool:
    """Return whether ``as_number`` accepts a value."""
    try:
        as_number(value)
    except (TypeError, ValueError):
        return False
    return True


def create_metrics_before_training(model: keras.Model, batch: tuple[Any, ...]) -> None:
    """Create the variables of the metrics that Keras would create in the first step on TensorFlow.

    TensorFlow traces a step twice if its first trace creates variables.

    Args:
        model: the compiled model. Nothing happens unless it is a network with one output and Keras' own steps.
        batch: TensorFlow's description of a batch: features, labels, and perhaps weights.
    """
    metrics = model._compile_metrics  # noqa: SLF001  (compile resolves metrics when it sees the first outputs)
    if metrics is None or metrics.built or not _has_one_output(model):
        return
    labels = keras.tree.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), batch[1])
    metrics.build(labels, model.outputs[0])


def _has_one_output(model: keras.Model) -> bool:
    """Return whether a model with Keras' own steps returns one array whose shape is known."""
    is_network = type(model) in (keras.Sequential, Functional)
    # A Sequential has no outputs if one of its layers cannot tell the shape of its own.
    return is_network and len(getattr(model, "outputs", None) or ()) == 1


def _metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the metrics of a model, including the metrics in containers."""
    return [inner for metric in model.metrics for inner in getattr(metric, "metrics", [metric])]


def _is_sum(metric: keras.metrics.Metric) -> bool:
    # Keras before 3.7 has sums only.
    return all(getattr(variable, "aggregation", "sum") == "sum" for variable in metric.variables)
