"""Additions to sparkhvd's models for programs that derive from Horovod's models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import cloudpickle
import numpy as np

from sparkhvd.data.schema.selection import quoted
from sparkhvd.driver.user_code.pickling import dumps
from sparkhvd.estimators.models.model import TrainedModel
from sparkhvd.estimators.models.outputs import spark_type
from sparkhvd.estimators.models.trained import ModelArtifacts
from sparkhvd.estimators.params.declarations import Declared, declared

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

# Parameters of Horovod's models that are part of the training artifacts here.
_ARTIFACT_PARAMS = ("_metadata", "model", "optimizer", "history", "loss", "loss_constructors", "custom_objects")


class SubclassableModel(TrainedModel):
    """A model that subclasses can create from parameters alone; precedes sparkhvd's model class in the bases.

    If a subclass defines ``get_prediction_fn``, the model predicts row by row: the method returns a function that takes
    the model and a row.
    """

    get_prediction_fn: Callable[[], Callable[[Any, Row], Any]] | None = None

    input_shapes: Declared[Sequence[Sequence[int]] | None] = declared("Shapes of the inputs.", default=None)

    def __init__(self, trained: ModelArtifacts | None = None, **values: Any) -> None:
        # A subclass sets the artifacts later, as its ``_metadata``.
        super().__init__(trained, **values)  # type: ignore[arg-type]

    @classmethod
    def of_artifacts(cls, trained: ModelArtifacts, **params: Any) -> Self:
        """Return the trained model without passing arguments to the constructor, which a subclass may have changed."""
        model = cls()
        model._set(_metadata=trained, **params)
        return model

    def _set(self, **values: Any) -> Self:
        if (trained := values.get("_metadata")) is not None:
            self._trained = trained
        return super()._set(**_supported_params(values))

    def _setDefault(self, **values: Any) -> Self:  # noqa: N802  (pyspark's name)
        return super()._setDefault(**_supported_params(values))

    def _transform(self, dataset: DataFrame) -> DataFrame:
        if self.get_prediction_fn is None:
            return super()._transform(dataset)
        from pyspark.ml.functions import array_to_vector  # noqa: PLC0415
        from pyspark.sql.functions import col, struct, udf  # noqa: PLC0415
        from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType  # noqa: PLC0415

        columns = self.output_columns(dataset.columns)
        fields = [StructField(str(index), ArrayType(DoubleType())) for index in range(len(columns))]
        predict = RowPredictor(dumps((self.getModel(), self.get_prediction_fn())))
        row = struct(*(col(quoted(name)).alias(name) for name in dataset.columns))
        predicted = udf(predict, StructType(fields))(row)
        outputs = []
        for index, column in enumerate(columns):
            values = predicted.getField(str(index))
            output = array_to_vector(values) if column.vector else values.getItem(0).cast(spark_type(column))
            outputs.append(output.alias(column.name))
        return dataset.select("*", *outputs)


class RowPredictor:
    """Predicts single rows on an executor; ``content`` is the pickled model and prediction function."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __call__(self, row: Row) -> tuple[list[float], ...]:
        """Return the values of every output."""
        model, predict = _unpickled(self.content)
        outputs = predict(model, row)
        parts = outputs if isinstance(outputs, list | tuple) else [outputs]
        return tuple([float(value) for value in np.asarray(part).reshape(-1)] for part in parts)


@lru_cache(maxsize=2)  # a Python worker of Spark may predict with several models, one after the other
def _unpickled(content: bytes) -> tuple[Any, Callable[[Any, Row], Any]]:
    model, predict = cloudpickle.loads(content)
    return model, predict


def _supported_params(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of parameters that sparkhvd's models have, by sparkhvd's names."""
    names = {"outputCols": "output_cols"}
    return {names.get(name, name): value for name, value in values.items() if name not in _ARTIFACT_PARAMS}
