"""The trained model as a Spark Transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from sparkhvd.data.schema import DataSchema
from sparkhvd.data.selection import expressions, schema_of, source
from sparkhvd.errors import ParamError, SchemaError
from sparkhvd.estimators.files import KeptFiles, Source, StoredFile
from sparkhvd.estimators.history import EpochRecord
from sparkhvd.estimators.params import ModelParams
from sparkhvd.estimators.persistence import FolderReader, FolderWriter, read_model, write_model
from sparkhvd.estimators.predict import OutputSpec, PredictSpec, arrow_function, field_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_PREDICTION = "sparkhvd_prediction"


@dataclass(frozen=True)
class Trained:
    """What a training run left.

    Attributes:
        store: where the model lies: a Store, or this process where it was trained without one.
        files: its files.
        schema: the columns that it was trained on.
        outputs: what it gives, one per label column.
        history: one record per epoch.
    """

    store: Source
    files: tuple[StoredFile, ...]
    schema: DataSchema
    outputs: tuple[OutputSpec, ...]
    history: tuple[EpochRecord, ...]


class TrainedModel(Model, ModelParams, MLWritable, MLReadable[Any]):
    """Adds the model's outputs to a DataFrame, one column per output.

    An output with one value per row is a number (float where the label was float, else double); one with several is a
    dense ML vector that keeps them all. A NULL in a feature column is an error when the rows are evaluated.
    """

    plugin: ClassVar[str]

    def __init__(self, trained: Trained, **values: Any) -> None:
        super().__init__(**values)
        self._trained = trained

    @property
    def trained(self) -> Trained:
        """What the training left: files, columns, history."""
        return self._trained

    def write(self) -> MLWriter:
        """A writer in Spark ML's format: ``model.write().overwrite().save(path)``."""
        return FolderWriter(partial(write_model, self))

    @classmethod
    def read(cls) -> MLReader[Any]:
        """A reader of what ``write`` wrote: ``read().load(path)``."""
        return FolderReader(partial(read_model, cls))

    def getHistory(self) -> list[dict[str, Any]]:  # noqa: N802  (Horovod's name)
        """One entry per epoch, in Horovod's form and with where the time went.

        Example:
            >>> model.getHistory()[0]  # doctest: +SKIP
            {'epoch': 0, 'train': {'loss': 0.7, 'all_metrics': [{'accuracy': 0.5}]}, 'validation': {}, ...}
        """
        return [
            {**record.to_json(), "train": _as_groups(record.train), "validation": _as_groups(record.validation)}
            for record in self._trained.history
        ]

    @property
    def output_names(self) -> list[str]:
        """The columns that ``transform`` adds."""
        given = self.getOrDefault("output_cols")
        return list(given) if given else [f"{name}__output" for name in self.getOrDefault("label_columns")]

    def getOutputCols(self) -> list[str]:  # noqa: N802  (Spark's name)
        """The columns that ``transform`` adds: ``<label>__output`` unless ``setOutputCols`` was called."""
        return self.output_names

    def _transform(self, dataset: DataFrame) -> DataFrame:
        from pyspark.sql.pandas.functions import arrow_udf  # noqa: PLC0415  (since Spark 4.1; only transform needs it)
        from pyspark.sql.types import StructField, StructType  # noqa: PLC0415

        names, spec = self._output_columns(dataset), self._predict_spec(dataset)
        fields = [StructField(field_of(i), _element_type(output)) for i, output in enumerate(spec.outputs)]
        predict = arrow_udf(arrow_function(spec), StructType(fields))  # type: ignore[call-overload]  # it takes structs
        predicted = dataset.select("*", predict(*expressions(spec.features)).alias(_PREDICTION))
        outputs = [
            _output(i, output).alias(name) for i, (name, output) in enumerate(zip(names, spec.outputs, strict=True))
        ]
        return predicted.select("*", *outputs).drop(_PREDICTION)

    def _output_columns(self, dataset: DataFrame) -> list[str]:
        names = self.output_names
        if len(names) != len(self._trained.outputs):
            raise ParamError(
                f"output_cols names {len(names)} columns {names} but the model has {len(self._trained.outputs)} "
                f"outputs, for the labels {list(self.getOrDefault('label_columns'))}."
            )
        there = {column.lower() for column in dataset.columns}
        for name in names:
            if name.lower() in there:
                raise SchemaError(
                    f"The DataFrame has a column {name!r} already, where transform would put the model's output. Drop "
                    "it, or choose another name with setOutputCols."
                )
        return names

    def _predict_spec(self, dataset: DataFrame) -> PredictSpec:
        trained = self._trained.schema.of("feature")
        chosen: Sequence[str] = self.getOrDefault("feature_columns")
        needs_numbers = all(column.is_number for column in trained)
        given = schema_of(dataset.schema, chosen, (), transformed=not needs_numbers).columns
        if len(given) != len(trained):
            raise ParamError(
                f"feature_columns names {len(given)} columns {[column.name for column in given]} but the model was "
                f"trained on {len(trained)}: {[column.name for column in trained]}."
            )
        features = []
        for column, known in zip(given, trained, strict=True):
            if (column.kind == "scalar") != (known.kind == "scalar"):
                raise SchemaError(
                    f"Feature column {column.name!r} is {_article(column.kind)}; the model was trained on "
                    f"{_article(known.kind)} ({known.name!r})."
                )
            features.append(replace(column, shape=known.shape, fill=known.fill, sparse=known.sparse))
        store = self._trained.store
        return PredictSpec(
            plugin=self.plugin,
            store=store.sent(dataset.sparkSession) if isinstance(store, KeptFiles) else store,
            files=self._trained.files,
            features=tuple(features),
            names=tuple(column.name for column in trained),
            outputs=self._trained.outputs,
            batch_size=self.getOrDefault("batch_size"),
        )


def _article(kind: str) -> str:
    return {"scalar": "a number", "array": "an array", "vector": "a vector"}[kind]


def _element_type(output: OutputSpec) -> DataType:
    from pyspark.sql.types import ArrayType, DoubleType, FloatType  # noqa: PLC0415

    element = FloatType() if output.element == "float32" else DoubleType()
    return ArrayType(element, containsNull=False) if output.vector else element


def _output(index: int, output: OutputSpec) -> Column:
    from pyspark.ml.functions import array_to_vector  # noqa: PLC0415

    column = source(_PREDICTION).getField(field_of(index))
    return array_to_vector(column) if output.vector else column


def _as_groups(values: Mapping[str, float]) -> dict[str, Any]:
    if not values:
        return {}
    return {"loss": values["loss"], "all_metrics": [{name: value} for name, value in values.items() if name != "loss"]}
