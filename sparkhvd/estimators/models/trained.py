"""The artifacts of models that were trained here or elsewhere."""

from __future__ import annotations

import math
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparkhvd._util.counts import counted
from sparkhvd.compat.spark import is_case_sensitive
from sparkhvd.data.read.batches import Arrays
from sparkhvd.data.schema import columns
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema, Fill
from sparkhvd.data.schema.selection import Selection, select
from sparkhvd.errors import ModelOutputError, ParamError
from sparkhvd.estimators.models.feature_matching import with_sources
from sparkhvd.estimators.models.outputs import OutputSpec
from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.training.job_files import FileSource, StoredFile, naming_full_disk, read_folder, write_folder
from sparkhvd.estimators.training.sample_rows import read_sample
from sparkhvd.estimators.training.synthetic_rows import at_least_two_rows, rows_of_ones
from sparkhvd.estimators.training.user_errors import describe_error
from sparkhvd.estimators.training.worker import find_plugin
from sparkhvd.store import Store, layout

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from sparkhvd.estimators.plugin import Predicted, Predictor

_SAMPLE_ROWS = 2


@dataclass(frozen=True)
class ModelArtifacts:
    """The results of a training run.

    Attributes:
        store: where the files can be read: a Store, or the memory of this process for a model without a Store.
        files: the model's files.
        schema: the columns that the model was trained on; a feature with a ``source`` is a field of a struct.
        outputs: one spec per output.
        history: one record per epoch.
    """

    store: FileSource
    files: tuple[StoredFile, ...]
    schema: DataSchema
    outputs: tuple[OutputSpec, ...]
    history: tuple[EpochRecord, ...]


def output_spec(shape: tuple[int, ...], label: ColumnSpec | None) -> OutputSpec:
    """Return the spec of an output: a number for one value per row; a vector for several, or for a non-scalar label."""
    vector = math.prod(shape) != 1 or (label is not None and label.kind != "scalar")
    is_float = label is not None and label.dtype == "float32"
    return OutputSpec(shape, "float32" if is_float and not vector else "float64", vector)


def output_specs(shapes: Sequence[tuple[int, ...]], labels: Sequence[ColumnSpec]) -> tuple[OutputSpec, ...]:
    """Return the spec of every output; ``labels`` has one label per output, or is empty if they are unknown."""
    by_output = labels or (None,) * len(shapes)
    return tuple(output_spec(shape, label) for shape, label in zip(shapes, by_output, strict=True))


def wrap_model(  # noqa: PLR0917
    plugin_name: str,
    params: Mapping[str, object],
    rows: DataFrame | StructType,
    feature_cols: Sequence[str],
    label_cols: Sequence[str],
    sparse_cols: Sequence[str],
    fill: Mapping[str, Fill],
    store: Store | None,
) -> ModelArtifacts:
    """Return the artifacts of a model that was trained elsewhere; see ``TrainedModel.from_model``."""
    from pyspark.sql.types import StructType  # noqa: PLC0415

    spark_schema = rows if isinstance(rows, StructType) else rows.schema
    plugin = find_plugin(plugin_name)
    selection = select(
        spark_schema,
        feature_cols=feature_cols,
        label_cols=label_cols,
        sparse_cols=sparse_cols,
        fill=fill,
        transformed=plugin.takes_texts,
        case_sensitive=not isinstance(rows, StructType) and is_case_sensitive(rows.sparkSession),
    )
    features, labels = DataSchema(tuple(selection.schema.of("feature"))), tuple(selection.schema.of("label"))
    if isinstance(rows, StructType) or rows.isStreaming:
        samples = _synthetic_samples(features)
        advice = " If it rejects zeros and ones because of their values, pass a DataFrame with real rows."
    else:
        features, sample = read_sample(rows, Selection(features), _SAMPLE_ROWS)
        samples, advice = [at_least_two_rows(sample)], ""
    schema = DataSchema((*features.columns, *labels))
    with tempfile.TemporaryDirectory(prefix="sparkhvd-wrap-") as folder:
        with naming_full_disk(folder):
            plugin.export(params, schema, Path(folder))
        try:
            outputs = _first_outputs(lambda: plugin.predictor(Path(folder)), samples)
        except Exception as error:
            raise ModelOutputError(
                f"The model cannot take the feature columns ({plugin.mapping(params, schema)}): "
                f"{describe_error(error)} Choose other feature_cols or input_shapes.{advice}"
            ) from error
        shapes = [np.asarray(output).shape[1:] for output in outputs]
        if labels and len(labels) != len(shapes):
            raise ParamError(
                f"The model has {counted(len(shapes), 'output')}, but label_cols has "
                f"{counted(len(labels), 'column')}: {label_cols}. Name one label column per output, "
                "or leave label_cols out."
            )
        specs = output_specs(shapes, labels)
        source, files = _save_files(Path(folder), store)
    return ModelArtifacts(source, files, with_sources(schema, feature_cols), specs, ())


def _first_outputs(predictor: Callable[[], Predictor], samples: Sequence[Arrays]) -> Sequence[Predicted]:
    """Return the outputs for the first sample that the model accepts, or raise the error about the first sample."""
    errors: list[Exception] = []
    for sample in samples:
        writable = {name: array.copy() for name, array in sample.items()}  # Arrow's memory is read-only
        try:
            return predictor().predict(writable)
        except Exception as error:  # noqa: BLE001 - the user's model may raise anything; the first error is raised below
            errors.append(error)
    raise errors[0]


def _synthetic_samples(features: DataSchema) -> list[Arrays]:
    """Return rows of zeros and rows of ones: a model may reject the values of either."""
    unknown = [column.name for column in features.columns if column.shape is None]
    if unknown:
        raise ParamError(
            f"The length of column {unknown[0]!r} is unknown because df is a schema or a streaming DataFrame. Pass a "
            "DataFrame that is not streaming and has at least one row."
        )
    zeros = {column.name: columns.blank(column, _SAMPLE_ROWS) for column in features.columns}
    return [zeros, rows_of_ones(zeros)]


def _save_files(folder: Path, store: Store | None) -> tuple[FileSource, tuple[StoredFile, ...]]:
    if store is None:
        files, in_memory = read_folder(folder)
        return in_memory, files
    target = f"{layout.model_folder(f'wrapped-{uuid.uuid4().hex[:16]}')}"
    return store, write_folder(store, target, folder)
