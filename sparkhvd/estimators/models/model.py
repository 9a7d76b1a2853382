"""The trained model as a Spark Transformer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLWritable

from sparkhvd._util.counts import counted
from sparkhvd._util.short_tracebacks import brief_errors
from sparkhvd.compat.spark import arrow_column, is_case_sensitive
from sparkhvd.data.schema.data_schema import Fill
from sparkhvd.data.schema.packing import packed, plan_packing
from sparkhvd.data.schema.selection import RESERVED_PREFIX
from sparkhvd.data.schema.user_defined_types import as_rows
from sparkhvd.driver.user_code.pickling import dumps
from sparkhvd.errors import ParamError
from sparkhvd.estimators.models.feature_matching import match_features
from sparkhvd.estimators.models.outputs import (
    AUTO,
    OutputColumn,
    check_output_names,
    default_output_names,
    output_column,
    spark_type,
)
from sparkhvd.estimators.models.persistence import FolderReader, FolderWriter, read_model, write_model
from sparkhvd.estimators.models.predict import PredictSpec, output_field, predict_batches
from sparkhvd.estimators.models.retained_files import RetainedFiles
from sparkhvd.estimators.models.trained import ModelArtifacts, wrap_model
from sparkhvd.estimators.params.named_inputs import columns_of, named_inputs
from sparkhvd.estimators.params.params import ModelParams, shapes
from sparkhvd.estimators.training.job_files import FileSource, InMemoryFiles
from sparkhvd.estimators.training.logs.history import History, to_history
from sparkhvd.estimators.training.sample_rows import require_spark_dataframe
from sparkhvd.estimators.training.user_errors import pickling
from sparkhvd.store import Store, store_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField, StructType


class TrainedModel(Model, ModelParams, MLWritable, MLReadable[Any]):
    """Adds the model's outputs to a DataFrame, one column per output.

    An output with one value per row becomes a number (float if the label is float, else double). An output with several
    values becomes a dense ML vector. ``output_types`` sets other types, see ``outputs``. ``prediction_fn`` replaces the
    plain call of the model. A NULL in a feature column without ``fill`` is an error when the rows
    are evaluated.
    """

    plugin: ClassVar[str]

    def __init__(self, trained: ModelArtifacts, **values: Any) -> None:
        super().__init__(**values)
        self._trained = trained
        self.retained_files: RetainedFiles | None = None

    @classmethod
    def of_artifacts(cls, trained: ModelArtifacts, **params: Any) -> Self:
        """Return the trained model; a subclass with a constructor of its own may override it."""
        return cls(trained, **params)

    @property
    def trained(self) -> ModelArtifacts:
        """The files, columns and history of the training."""
        return self._trained

    @property
    def file_source(self) -> FileSource:
        """Where this process reads the model's files."""
        return self.retained_files or self._trained.store

    def write(self) -> FolderWriter:
        """Return a writer in Spark ML's format: ``model.write().overwrite().save(path)``."""
        return FolderWriter(partial(write_model, self))

    @classmethod
    def read(cls) -> FolderReader[Self]:
        """Return a reader of models that ``write`` wrote: ``read().load(path)``."""
        return FolderReader(partial(read_model, cls))

    def getHistory(self) -> History:  # noqa: N802  (Horovod's name)
        """Return one entry per epoch in Horovod's form, with the time spent; ``to_pandas()`` makes a table of it.

        Examples:
            >>> model.getHistory()[0]  # doctest: +SKIP
            {'epoch': 0, 'train': {'loss': 0.7, 'all_metrics': [{'accuracy': 0.5}]}, 'validation': {}, ...}
        """
        return to_history(self._trained.history)

    @property
    def history(self) -> History:
        """The same as ``getHistory()``."""
        return self.getHistory()

    def plot_history(self) -> Figure:
        """Plot loss and metrics by epoch; needs matplotlib.

        Raises:
            ConfigError: matplotlib is not installed.
            ParamError: the model has no history because it was not trained here.
        """
        return self.getHistory().plot()

    @classmethod
    @brief_errors
    def from_model(
        cls,
        model: object,
        df: DataFrame | StructType,
        *,
        feature_cols: Sequence[str] | None = None,
        label_cols: Sequence[str] = (),
        inputs: Mapping[str, object] | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        sparse_cols: Sequence[str] = (),
        fill: Mapping[str, Fill] | None = None,
        custom_objects: Mapping[str, object] | None = None,
        store: Store | str | None = None,
        **params: object,
    ) -> Self:
        """Return a Transformer for a model that was trained elsewhere.

        The model runs once on a few rows of ``df`` to find the shape of its outputs; nothing is trained.

        Args:
            model: the framework's own model; it is copied, not changed.
            df: rows to predict (two are read), or their schema if all feature columns are numbers. Of a streaming
                DataFrame, only the schema is used.
            feature_cols: the columns that the model reads, as for the estimator.
            inputs: as for the estimator.
            label_cols: columns that the outputs predict: they name the output columns, and ``"label"`` in
                ``output_types`` means their types. Without them, the output columns are ``prediction`` (or
                ``prediction_0`` and so on).
            input_shapes: as for the estimator.
            sparse_cols: as for the estimator.
            fill: as for the estimator.
            custom_objects: as for ``KerasEstimator``.
            store: the Store, or its URL, for the model's files; without a Store, this process holds them in memory and
                sends them with the Spark session.
            params: parameters of the Transformer, such as ``output_cols`` and ``prediction_fn``.

        Raises:
            SchemaError: a column is missing or cannot be used.
            ParamError: the model cannot take the columns.

        Examples:
            >>> TorchModel.from_model(net, df, feature_cols=["pixels"]).transform(df)  # doctest: +SKIP
        """
        store = None if store is None else store_at("store", store)
        named = None if inputs is None else named_inputs("inputs", inputs)
        feature_cols = columns_of(named) if feature_cols is None and named is not None else feature_cols
        if feature_cols is None:
            raise ParamError("from_model needs feature_cols: pass the names of the columns that the model reads.")
        estimator_params = {
            "model": model,
            "inputs": named,
            "input_shapes": input_shapes and shapes("input_shapes", input_shapes),
            "custom_objects": custom_objects,
        }
        trained = wrap_model(cls.plugin, estimator_params, df, feature_cols, label_cols, sparse_cols, fill or {}, store)
        labels = [column.name for column in trained.schema.of("label")]
        names = {"feature_columns": feature_cols, "label_columns": labels or None}
        return cls(trained, **names, **params)

    @property
    def output_names(self) -> list[str]:
        """The columns that ``transform`` adds."""
        output_cols, labels = self.getOrDefault("output_cols"), self.getOrDefault("label_columns")
        if output_cols:
            return list(output_cols)
        if labels:
            return default_output_names(labels)
        count = len(self.getOrDefault("output_types") or self._trained.outputs)
        return ["prediction"] if count == 1 else [f"prediction_{index}" for index in range(count)]

    def getOutputCols(self) -> list[str]:  # noqa: N802  (Spark's name)
        """Return the columns that ``transform`` adds: by default ``<label>__output``, without labels ``prediction``."""
        return self.output_names

    @brief_errors
    def _transform(self, dataset: DataFrame) -> DataFrame:
        from pyspark.sql.types import StructField, StructType  # noqa: PLC0415

        require_spark_dataframe("transform", dataset)
        columns = self.output_columns(dataset.columns)
        fields = [StructField(output_field(index), spark_type(column)) for index, column in enumerate(columns)]
        spec = self._predict_spec(dataset, columns, fields)
        column_type = fields[0].dataType if len(fields) == 1 else StructType(fields)
        dataset = as_rows(dataset, [column.path[0] for column in spec.features])
        arrays, others = packed(spec.features, spec.packing)
        names = [f"{_unused_prefix(dataset)}{index}" for index in range(len(arrays))]
        if arrays:
            dataset = dataset.select("*", *(array.alias(name) for array, name in zip(arrays, names, strict=True)))
        # All outputs share the column, so Spark evaluates it once.
        predicted = arrow_column(dataset, partial(predict_batches, spec), column_type, [*names, *others])
        outputs = [
            _output(predicted if len(columns) == 1 else predicted.getField(output_field(index)), column)
            for index, column in enumerate(columns)
        ]
        transformed = dataset.select("*", *outputs)
        return transformed.drop(*names) if names else transformed

    def output_columns(self, taken: Sequence[str] = ()) -> tuple[OutputColumn, ...]:
        """Return the columns that ``transform`` adds for the outputs; ``taken`` are the names of existing columns.

        Raises:
            ParamError: ``output_cols`` or ``output_types`` do not fit the outputs.
            SchemaError: a name is taken.
        """
        names, outputs = self.output_names, self._trained.outputs
        has_prediction_fn = self.getOrDefault("prediction_fn") is not None
        types: Sequence[str] = self.getOrDefault("output_types") or (AUTO,) * len(outputs)
        if not has_prediction_fn and len(types) != len(outputs):
            raise ParamError(
                f"output_types has {counted(len(types), 'type')} {list(types)}, but the model has "
                f"{counted(len(outputs), 'output')}. Set one type per output."
            )
        if len(names) != len(types):
            label_columns = self.getOrDefault("label_columns")
            raise ParamError(
                f"output_cols names {counted(len(names), 'column')} {names} for {counted(len(types), 'output')}"
                f"{f' (label columns {list(label_columns)})' if label_columns else ''}. Name one column per output."
            )
        check_output_names(names, taken)
        labels = self._trained.schema.of("label")
        return tuple(
            output_column(
                name,
                output_type,
                outputs[index] if (output_type == AUTO and index < len(outputs)) or not has_prediction_fn else None,
                labels[index] if index < len(labels) else None,
            )
            for index, (name, output_type) in enumerate(zip(names, types, strict=True))
        )

    def _predict_spec(
        self, dataset: DataFrame, outputs: tuple[OutputColumn, ...], fields: Sequence[StructField]
    ) -> PredictSpec:
        from pyspark.sql.pandas.types import to_arrow_type  # noqa: PLC0415

        trained = self._trained.schema.of("feature")
        features = match_features(
            dataset.schema,
            self.getOrDefault("feature_columns"),
            trained,
            case_sensitive=is_case_sensitive(dataset.sparkSession),
        )
        store = self._trained.store
        return PredictSpec(
            plugin=self.plugin,
            store=store.sent_with(dataset.sparkSession) if isinstance(store, InMemoryFiles) else store,
            files=self._trained.files,
            features=tuple(features),
            packing=plan_packing(dataset.schema, features),
            names=tuple(column.name for column in trained),
            outputs=outputs,
            types=tuple(to_arrow_type(field.dataType) for field in fields),
            batch_size=self.getOrDefault("inference_batch_size"),
            function=pickle_function(self.getOrDefault("prediction_fn")),
        )


def pickle_function(function: Callable[..., object] | None) -> bytes:
    """Return a pickled prediction function for the executors, or no bytes for None.

    Raises:
        ParamError: the function cannot be pickled.
    """
    if function is None:
        return b""
    with pickling("prediction_fn", "the executors"):
        return dumps(function)


def _unused_prefix(dataset: DataFrame) -> str:
    """Return a prefix that no column of the DataFrame starts with."""
    prefix = f"{RESERVED_PREFIX}features_"
    while any(name.lower().startswith(prefix) for name in dataset.columns):
        prefix += "_"
    return prefix


def _output(predicted: Column, output: OutputColumn) -> Column:
    from pyspark.ml.functions import array_to_vector  # noqa: PLC0415

    return (array_to_vector(predicted) if output.vector else predicted).alias(output.name)
