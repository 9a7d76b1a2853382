"""The plug-in for ``LinearRegression``: checks on the driver, training on the ranks, prediction on executors."""

from __future__ import annotations

import copy
import logging
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from numpy_linear.regression import LinearRegression, Vector
from sparkhvd._util.frameworks import estimator_hint
from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.data.read.batches import Arrays, BatchSource
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.errors import ModelOutputError, ParamError
from sparkhvd.estimators.batch_dependence import BatchDependence
from sparkhvd.estimators.params.policies import check_monitored, metric_value, monitored_metrics
from sparkhvd.estimators.plugin import ON_CPU, FrameworkPlugin, Inference, Trainer, TrainHooks, TrainSpec
from sparkhvd.estimators.reports import EpochRecord, EpochReport, StepReport, StepTimes
from sparkhvd.estimators.runs.resume_check import ModelFacts
from sparkhvd.world import World

logger = logging.getLogger(__name__)

_MODEL, _FEATURES = "regression.npy", "features.txt"


@dataclass(frozen=True)
class Package:
    """The parameters that the ranks need."""

    model: LinearRegression
    rate: float
    halve_on: str | None
    log_weights: bool


class LinearPlugin:
    """Implements ``FrameworkPlugin`` for ``LinearRegression``."""

    takes_texts: ClassVar[bool] = False

    def check(self, params: Mapping[str, object], schema: DataSchema, rows: Arrays | None) -> list[tuple[int, ...]]:
        model = _model(params)
        check_monitored(self.monitors(params), ["loss"])
        return [] if rows is None else _try(model, schema, rows)

    def try_out(self, payload: bytes, schema: DataSchema, rows: Arrays) -> list[tuple[int, ...]]:
        package: Package = pickle.loads(payload)
        return _try(package.model, schema, rows)

    def mapping(self, params: Mapping[str, object], schema: DataSchema) -> str:
        return f"{' and '.join(_names(schema))} predict {' and '.join(column.name for column in schema.of('label'))}"

    def pack(self, params: Mapping[str, object]) -> bytes:
        rate, halve_on = params["learning_rate"], params["halve_rate_on"]
        assert isinstance(rate, float)
        assert halve_on is None or isinstance(halve_on, str)
        return pickle.dumps(Package(_model(params), rate, halve_on, bool(params["log_weights"])))

    def monitors(self, params: Mapping[str, object]) -> Mapping[str, str]:
        own = params.get("halve_rate_on")
        return {**monitored_metrics(params), **({"halve_rate_on": own} if isinstance(own, str) else {})}

    def facts(self, params: Mapping[str, object]) -> ModelFacts:
        return ModelFacts("NumPy", "gradient descent", {"weights": _model(params).weights.shape})

    def batch_dependence(self, params: Mapping[str, object]) -> BatchDependence:
        return BatchDependence()

    def packages(self) -> tuple[str, ...]:
        return ("numpy",)

    def trainer(self, payload: bytes, spec: TrainSpec, world: World) -> Trainer:
        return LinearTrainer(pickle.loads(payload), spec, world)

    def export(self, params: Mapping[str, object], schema: DataSchema, folder: Path) -> None:
        _save(folder, _model(params), _names(schema))

    def predictor(self, folder: Path, inference: Inference = ON_CPU) -> LinearPredictor:
        return LinearPredictor(load_model(folder), (folder / _FEATURES).read_text().split("\n"), inference.function)


class LinearTrainer:
    """Runs gradient descent with the mean gradient over the rows of all ranks."""

    def __init__(self, package: Package, spec: TrainSpec, world: World) -> None:
        self._package = package
        self._spec = spec
        self._world = world
        self._model = copy.deepcopy(package.model)
        self._rate = package.rate * (world.size if spec.scale_lr else 1)
        self._last = np.inf

    def restore(self, state: bytes) -> None:
        self._model.weights, self._rate, self._last = pickle.loads(state)

    def state(self) -> bytes:
        return pickle.dumps((self._model.weights, self._rate, self._last))

    def fit(self, train: BatchSource, val: BatchSource | None, hooks: TrainHooks) -> None:
        for epoch in range(hooks.first_epoch, self._spec.epochs):
            start = time.monotonic()
            sums = self._train(train, epoch, hooks)
            times = StepTimes(compute=time.monotonic() - start)
            held_out = {} if val is None else {"loss": self._validate(val, epoch)}
            steps = train.steps() - (hooks.first_step if epoch == hooks.first_epoch else 0)
            report = EpochReport(epoch, {"loss": sums}, held_out, times, steps, self._adapt)
            if not hooks.on_epoch_end(report, self):
                break
        hooks.on_train_end(self)

    def export(self, folder: Path) -> None:
        _save(folder, self._model, _names(self._spec.schema))

    def _train(self, source: BatchSource, epoch: int, hooks: TrainHooks) -> tuple[float, int]:
        total, rows = 0.0, 0
        first = hooks.first_step if epoch == hooks.first_epoch else 0
        for step, batch in enumerate(source.epoch(epoch, first), first + 1):
            loss, gradient = None, np.zeros_like(self._model.weights)
            if batch.rows:
                features, labels = _examples(batch.columns, self._spec.schema)
                loss = float(np.square(self._model(features) - labels).mean())
                gradient = self._model.gradient(features, labels)
                total, rows = total + loss * batch.rows, rows + batch.rows
            summed = session.current().allreduce(gradient, ReduceOp.SUM, name=f"gradient {step}").astype(np.float64)
            self._model.weights -= self._rate * summed / batch.global_rows
            report = StepReport(epoch, step, source.steps(), loss, lambda: {"loss": (total, rows)}, lambda: b"")  # noqa: B023
            hooks.on_step_end(report, self)
        return total, rows

    def _validate(self, source: BatchSource, epoch: int) -> tuple[float, int]:
        total, rows = 0.0, 0
        for batch in source.epoch(epoch):
            if batch.rows:
                features, labels = _examples(batch.columns, self._spec.schema)
                total, rows = total + float(np.square(self._model(features) - labels).sum()), rows + batch.rows
        return total, rows

    def _adapt(self, record: EpochRecord) -> bool:
        if self._package.halve_on is not None:
            value = metric_value(record, self._package.halve_on)
            self._rate, self._last = self._rate / 2 if value > self._last else self._rate, value
        if self._package.log_weights and self._world.rank == 0:
            logger.info("weights %s", self._model.weights)
        return False


@dataclass(frozen=True)
class LinearPredictor:
    """A trained model in an executor."""

    model: LinearRegression
    names: Sequence[str]
    function: Callable[..., Vector] | None

    def predict(self, columns: Arrays) -> list[Vector]:
        rows = _stacked(columns, self.names)
        return [self.model(rows) if self.function is None else self.function(self.model, rows)]


def load_model(folder: Path) -> LinearRegression:
    """Return the model that a trainer exported."""
    weights = np.load(folder / _MODEL)
    model = LinearRegression(len(weights) - 1, np.random.default_rng(0))
    model.weights = weights
    return model


def _save(folder: Path, model: LinearRegression, names: Sequence[str]) -> None:
    np.save(folder / _MODEL, model.weights)
    (folder / _FEATURES).write_text("\n".join(names))


def _model(params: Mapping[str, object]) -> LinearRegression:
    model = params["model"]
    if not isinstance(model, LinearRegression):
        hint = estimator_hint(model, ("numpy_linear",))
        raise ParamError(f"model is a {type(model).__name__}; it must be a LinearRegression.{hint}")
    return model


def _try(model: LinearRegression, schema: DataSchema, rows: Arrays) -> list[tuple[int, ...]]:
    features = _features(rows, schema)
    if features.shape[1] + 1 != len(model.weights):
        expected = len(model.weights) - 1
        raise ModelOutputError(f"The model has {expected} features, but the rows have {features.shape[1]}.")
    return [model(features).shape[1:]]


def _names(schema: DataSchema) -> list[str]:
    return [column.name for column in schema.of("feature")]


def _features(columns: Arrays, schema: DataSchema) -> Vector:
    return _stacked(columns, _names(schema))


def _examples(columns: Arrays, schema: DataSchema) -> tuple[Vector, Vector]:
    (label,) = schema.of("label")
    return _features(columns, schema), columns[label.name].astype(np.float64)


def _stacked(columns: Arrays, names: Sequence[str]) -> Vector:
    arrays = [columns[name].astype(np.float64) for name in names]
    return np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)


PLUGIN: FrameworkPlugin = LinearPlugin()
