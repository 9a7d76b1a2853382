"""Horovod's behavior where it differs from sparkhvd's, added to sparkhvd's estimators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from sparkhvd.config import environment_for_hosts
from sparkhvd.estimators.api.estimator import DistributedEstimator
from sparkhvd.estimators.models.model import TrainedModel
from sparkhvd.estimators.params.fit_plan import FitPlan
from sparkhvd.estimators.params.params import EstimatorParams
from sparkhvd.estimators.training.worker import TrainResult

__all__ = ["HorovodEstimator", "HorovodModel"]

logger = logging.getLogger("horovod")

Row = Mapping[str, Any]
HorovodEstimator = DistributedEstimator
HorovodModel = TrainedModel


class RowByRow:
    """Turns a function of a row into a function of a batch, as sparkhvd's ``transformation_fn`` must be."""

    def __init__(self, function: Callable[[Row], Row]) -> None:
        self.function = function

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Transform the rows of a batch one by one."""
        count = len(next(iter(batch.values())))
        rows = [self.function({name: values[number] for name, values in batch.items()}) for number in range(count)]
        return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}


class HorovodsMeaning(EstimatorParams):
    """Parameters with Horovod's defaults and meaning; list it before sparkhvd's class among the bases."""

    model_class: ClassVar[type[TrainedModel]]

    def __init__(self, *unnamed: Any, **values: Any) -> None:
        super().__init__(*unnamed)
        self._setDefault(scale_lr=True, backend_env=environment_for_hosts())
        logger.warning(
            "As with Horovod, %s multiplies the learning rate by the number of ranks (scale_lr=False does not), and "
            "the ranks get the driver's environment variables.",
            type(self).__name__,
        )
        self.setParams(**values)

    def setParams(self, **values: Any) -> Any:  # noqa: N802  (pyspark's name)
        """Set several parameters by keyword; those without a meaning in sparkhvd are ignored with a warning."""
        retired = type(self).retired.keys() - type(self).declarations.keys()
        ignored = sorted(name for name in values.keys() & retired if values[name] is not None)
        if ignored:
            logger.warning("%s ignores %s, which has no effect here.", type(self).__name__, ", ".join(ignored))
        return super().setParams(**{name: value for name, value in values.items() if name not in retired})

    def _set(self, **values: Any) -> Any:
        function = values.get("transformation_fn")
        if function is not None and not isinstance(function, RowByRow):
            values["transformation_fn"] = RowByRow(function)
        return super()._set(**values)

    def get_model_class(self) -> type[TrainedModel]:
        """Return the class of the fitted model; a subclass may name its own, see ``_get_model_kwargs``."""
        return self.model_class

    def _get_model_kwargs(
        self, model: object, history: object, optimizer: object, run_id: str, metadata: object
    ) -> dict[str, Any]:
        """Return the arguments of the class that a subclass has named, with ``metadata`` as ``_metadata``."""
        return {"model": model, "history": history, "optimizer": optimizer, "run_id": run_id, "_metadata": metadata}

    def _model(self, plan: FitPlan, result: TrainResult) -> TrainedModel:
        fitted: TrainedModel = super()._model(plan, result)  # type: ignore[misc]  # of the class after this one
        kind = self.get_model_class()
        if kind is self.model_class:
            return fitted
        run_id = fitted.getOrDefault("run_id")
        return kind(**self._get_model_kwargs(fitted.getModel(), fitted.getHistory(), None, run_id, fitted.trained))

    def _setter_of_retired(self, name: str) -> Callable[[object], Any]:
        return lambda value: self.setParams(**{name: value})

    def _getter_of_retired(self, name: str) -> Callable[[], object]:
        del name
        return lambda: None
