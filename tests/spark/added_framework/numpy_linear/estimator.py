"""The estimator and its Transformer."""

from __future__ import annotations

from typing import ClassVar

from numpy_linear import regression
from numpy_linear.plugin import load_model
from sparkhvd.estimators.api.estimator import DistributedEstimator
from sparkhvd.estimators.models.model import TrainedModel
from sparkhvd.estimators.params.declarations import Declared, Identity, declared
from sparkhvd.estimators.params.params import flag, positive_number
from sparkhvd.estimators.training.job_files import local_copies

_PLUGIN = "numpy_linear.plugin:PLUGIN"


class LinearTransformer(TrainedModel):
    """A trained ``LinearRegression`` as a Spark Transformer."""

    plugin: ClassVar[str] = _PLUGIN

    def get_model(self) -> regression.LinearRegression:
        """Return the trained model."""
        with local_copies(self.trained.store, self.trained.files) as folder:
            return load_model(folder)


class LinearEstimator(DistributedEstimator):
    """Trains a ``LinearRegression`` by gradient descent over the rows of all ranks."""

    plugin: ClassVar[str] = _PLUGIN
    model_class: ClassVar[type[TrainedModel]] = LinearTransformer
    preload: ClassVar[tuple[str, ...]] = ("numpy_linear", "numpy_linear.plugin", "sparkhvd.estimators.training.worker")
    required: ClassVar[tuple[str, ...]] = ("model", "feature_cols", "label_cols")

    model: Declared[regression.LinearRegression | None] = declared("The model to train; it is copied.", default=None)
    learning_rate: Declared[float] = declared("The size of a step.", positive_number, default=0.1)
    halve_rate_on: Declared[str | None] = declared("The metric whose increase halves the rate.", default=None)
    log_weights: Declared[bool] = declared(
        "Whether rank 0 logs the weights.", flag, default=False, identity=Identity.NEVER
    )
