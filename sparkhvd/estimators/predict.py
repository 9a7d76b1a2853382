"""Prediction inside Spark's Python workers: Arrow columns in, one struct of outputs per row back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkhvd.data import columns as columns_of
from sparkhvd.data.schema import ColumnSpec
from sparkhvd.errors import DataError, ModelOutputError
from sparkhvd.estimators.files import Source, StoredFile, fetched
from sparkhvd.estimators.plugin import Predictor
from sparkhvd.estimators.worker import find_plugin

_LOADED_LIMIT = 4
# The loaded models of this Python worker, by the digests of their files; Spark reuses the process for later tasks.
_loaded: dict[tuple[StoredFile, ...], Predictor] = {}


@dataclass(frozen=True)
class OutputSpec:
    """One output of a model.

    Attributes:
        shape: shape of one row.
        element: numpy name of the elements in Spark: float32 or float64.
        vector: whether the column is an ML vector; else it is one number per row.
    """

    shape: tuple[int, ...]
    element: str
    vector: bool


@dataclass(frozen=True)
class PredictSpec:
    """What an executor needs to predict.

    Attributes:
        plugin: ``module:name`` of the framework's plug-in.
        store: where the model can be read.
        files: its files.
        features: the columns as they come, in the order of the model's inputs, with the shapes of the training.
        names: the names that the model knows these columns by.
        outputs: what the model gives.
        batch_size: rows that are predicted at once.
    """

    plugin: str
    store: Source
    files: tuple[StoredFile, ...]
    features: tuple[ColumnSpec, ...]
    names: tuple[str, ...]
    outputs: tuple[OutputSpec, ...]
    batch_size: int


def field_of(index: int) -> str:
    """The name of an output in the struct that ``predict_batches`` yields."""
    return f"output_{index}"


def predict_batches(spec: PredictSpec, batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
    """The predictions for Arrow batches; the model is loaded once per Python worker.

    Raises:
        DataError: a feature is NULL or has another length than in the training; the message names the column.
    """
    predictor = _predictor(spec)
    for batch in batches:
        columns = dict(
            zip(spec.names, (_decoded(array, c) for array, c in zip(batch, spec.features, strict=True)), strict=True)
        )
        yield _encoded(_predicted(predictor, columns, len(batch[0]), spec), spec.outputs)


def _predictor(spec: PredictSpec) -> Predictor:
    if spec.files not in _loaded:
        with fetched(spec.store, spec.files, _application_folder()) as folder:
            predictor = find_plugin(spec.plugin).predictor(folder)
        while len(_loaded) >= _LOADED_LIMIT:
            _loaded.pop(next(iter(_loaded)))
        _loaded[spec.files] = predictor
    return _loaded[spec.files]


def _application_folder() -> str | None:
    """Inside a task, the folder that Spark removes with the application: a task that is killed removes nothing."""
    from pyspark import SparkFiles, TaskContext  # noqa: PLC0415  (decoding needs no Spark)

    return None if TaskContext.get() is None else SparkFiles.getRootDirectory()


def _decoded(array: pa.Array, column: ColumnSpec) -> npt.NDArray[np.generic]:
    if array.null_count and column.fill is None:
        raise DataError(
            f"Feature column {column.name!r} holds NULL in {array.null_count} of {len(array)} rows, for which there "
            f"is no prediction. Drop these rows first (df.dropna(subset=[{column.name!r}])) or fill them (df.fillna)."
        )
    lengths = columns_of.lengths(array.drop_null() if array.null_count else array)
    length = column.shape[0] if column.shape else 0
    if lengths is not None and len(lengths) and not lengths.min() == lengths.max() == length:
        raise DataError(
            f"Feature column {column.name!r} has rows of length {lengths.min()} to {lengths.max()}; the model was "
            f"trained with rows of length {length}."
        )
    return columns_of.to_numpy(array, column, "the DataFrame")


def _predicted(
    predictor: Predictor, columns: dict[str, npt.NDArray[np.generic]], rows: int, spec: PredictSpec
) -> list[npt.NDArray[np.generic]]:
    parts: list[list[npt.NDArray[np.generic]]] = []
    for start in range(0, rows, spec.batch_size):
        # A copy, because Arrow's memory is read-only and frameworks alias what they are given.
        piece = {name: array[start : start + spec.batch_size].copy() for name, array in columns.items()}
        parts.append(list(predictor.predict(piece)))
    if not parts:
        return [np.empty((0, *output.shape), output.element) for output in spec.outputs]
    return [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]


def _encoded(predictions: list[npt.NDArray[np.generic]], outputs: Sequence[OutputSpec]) -> pa.Array:
    arrays = []
    for prediction, output in zip(predictions, outputs, strict=True):
        if prediction.shape[1:] != output.shape:
            raise ModelOutputError(
                f"The model's output has rows of shape {list(prediction.shape[1:])}; at the training it was "
                f"{list(output.shape)}."
            )
        flat = np.ascontiguousarray(prediction.reshape(-1), dtype=output.element)
        values = pa.array(flat)
        if output.vector:
            width = int(np.prod(output.shape, dtype=int))
            offsets = pa.array(np.arange(len(prediction) + 1, dtype=np.int32) * np.int32(width))
            values = pa.ListArray.from_arrays(offsets, values)
        arrays.append(values)
    return pa.StructArray.from_arrays(arrays, [field_of(index) for index in range(len(arrays))])


def arrow_function(spec: PredictSpec) -> Callable[..., Iterator[pa.Array]]:
    """``predict_batches`` as a function whose annotations tell Spark what it takes."""
    if len(spec.features) == 1:

        def predict_one(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
            return predict_batches(spec, ((array,) for array in batches))

        return predict_one

    def predict(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        return predict_batches(spec, batches)

    return predict
