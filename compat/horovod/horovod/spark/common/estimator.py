"""Horovod's behavior for sparkhvd's estimators, where the two differ."""

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
    """Converts Horovod's ``transformation_fn``, a function of a row, to sparkhvd's, a function of a batch."""

    def __init__(self, function: Callable[[Row], Row]) -> None:
        self.function = function

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Transform the rows of a batch one by one."""
        count = len(next(iter(batch.values())))
        rows = [self.function({name: values[number] for name, values in batch.items()}) for number in range(count)]
        return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}


class HorovodParams(EstimatorParams):
    """Parameters with Horovod's defaults and meaning; precedes sparkhvd's estimator class in the bases."""

    model_class: ClassVar[type[TrainedModel]]

    def __init__(self, *unnamed: Any, **values: Any) -> None:
        super().__init__(*unnamed)
        self._setDefault(scale_lr=True, backend_env=environment_for_hosts())
        logger.warning(
            "As in Horovod, %s multiplies the learning rate by the number of ranks, and the ranks get the driver's "
            "environment variables. Pass scale_lr=False to keep the learning rate.",
            type(self).__name__,
        )
        self.setParams(**values)

    def setParams(self, **values: Any) -> Any:  # noqa: N802  (pyspark's name)
        """Set several parameters by keyword; ignore those that sparkhvd does not have, with a warning."""
        retired = type(self).retired.keys() - type(self).declarations.keys()
        ignored = sorted(name for name in values.keys() & retired if values[name] is not None)
        if ignored:
            logger.warning(
                "%s ignores parameters that sparkhvd does not have: %s.", type(self).__name__, ", ".join(ignored)
            )
        return super().setParams(**{name: value for name, value in values.items() if name not in retired})

    def _set(self, **values: Any) -> Any:
        function = values.get("transformation_fn")
        if function is not None and not isinstance(function, RowByRow):
            values["transformation_fn"] = RowByRow(function)
        return super()._set(**values)

    def get_model_class(self) -> type[TrainedModel]:
        """Return the class of the fitted model; a subclass may return its own (see ``_get_model_kwargs``)."""
        return self.model_class

    def _get_model_kwargs(
        self, model: object, history: object, optimizer: object, run_id: str, metadata: object
    ) -> dict[str, Any]:
        """Return the constructor arguments for a subclass's own model class; ``metadata`` becomes ``_metadata``."""
        return {"model": model, "history": history, "optimizer": optimizer, "run_id": run_id, "_metadata": metadata}

    def _model(self, plan: FitPlan, result: TrainResult) -> TrainedModel:
        fitted: TrainedModel = super()._model(plan, result)  # type: ignore[misc]  # the next class defines it
        model_class = self.get_model_class()
        if model_class is self.model_class:
            return fitted
        run_id = fitted.getOrDefault("run_id")
        return model_class(
            **self._get_model_kwargs(fitted.getModel(), fitted.getHistory(), None, run_id, fitted.trained)
        )

    def _retired_setter(self, name: str) -> Callable[[object], Any]:
        return lambda value: self.setParams(**{name: value})

    def _retired_getter(self, name: str) -> Callable[[], object]:
        del name
        return lambda: None
