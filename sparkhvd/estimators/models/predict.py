"""Prediction inside Spark's Python workers: from Arrow columns to one output, or one struct of outputs, per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import cloudpickle
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkhvd._util.counts import counted
from sparkhvd._util.framework_imports import gc_paused_for_import, keep_triton_from_tensorflow
from sparkhvd.config import visible_devices
from sparkhvd.data.schema import columns as columns_of
from sparkhvd.data.schema.data_schema import ColumnSpec
from sparkhvd.data.schema.packing import ColumnPacking, unpacked
from sparkhvd.errors import DataError, ModelOutputError
from sparkhvd.estimators.models.outputs import OutputColumn, encode_output, with_rows
from sparkhvd.estimators.plugin import FrameworkPlugin, Inference, Predictor
from sparkhvd.estimators.training.job_files import FileSource, StoredFile, local_copies
from sparkhvd.estimators.training.worker import find_plugin

_LOADED_LIMIT = 4
# The loaded models of this Python worker, by files and digests, prediction function and GPU. Spark reuses the process
# for later tasks.
_loaded: dict[tuple[tuple[StoredFile, ...], bytes, int | None], Predictor] = {}


@dataclass(frozen=True)
class PredictSpec:
    """Everything that an executor needs to predict.

    Attributes:
        plugin: ``module:name`` of the framework's plug-in.
        store: where the model's files can be read.
        files: the model's files.
        features: the columns of the DataFrame, in the order of the model's inputs, with the shapes of the training.
        packing: the groups of these columns that share an array.
        names: the names of these columns in the training.
        outputs: the columns to return.
        types: the Arrow types of the outputs.
        batch_size: rows per prediction.
        function: the user's prediction function, pickled; empty to call the model itself.
    """

    plugin: str
    store: FileSource
    files: tuple[StoredFile, ...]
    features: tuple[ColumnSpec, ...]
    packing: ColumnPacking
    names: tuple[str, ...]
    outputs: tuple[OutputColumn, ...]
    types: tuple[pa.DataType, ...]
    batch_size: int
    function: bytes = b""


def output_field(index: int) -> str:
    """Return the name of an output in the struct that ``predict_batches`` yields for several outputs."""
    return f"output_{index}"


def predict_batches(spec: PredictSpec, batches: Iterator[Sequence[pa.Array]]) -> Iterator[pa.Array]:
    """Yield the predictions for Arrow batches; the model is loaded once per Python worker.

    Args:
        spec: the model, its inputs and its outputs.
        batches: the feature columns in the form of ``sparkhvd.data.schema.packing``.

    Raises:
        DataError: a feature is NULL and has no fill, or its length differs from the training; the message names the
            column.
    """
    predictor = _predictor(spec)
    for batch in batches:
        features = map(_decode, unpacked(batch, spec.packing), spec.features)
        arrays = _predict(predictor, dict(zip(spec.names, features, strict=True)), len(batch[0]), spec)
        names = [output_field(index) for index in range(len(arrays))]
        yield arrays[0] if len(arrays) == 1 else pa.StructArray.from_arrays(arrays, names)


def _predictor(spec: PredictSpec) -> Predictor:
    gpu = _assigned_gpu()
    key = (spec.files, spec.function, gpu)
    if key not in _loaded:
        keep_triton_from_tensorflow()  # Spark reuses Python workers, so this one may have loaded a Keras model
        function = cloudpickle.loads(spec.function) if spec.function else None
        plugin = _import_plugin(spec.plugin)
        with local_copies(spec.store, spec.files, _application_folder()) as folder:
            predictor = plugin.predictor(folder, Inference(gpu, function))
        while len(_loaded) >= _LOADED_LIMIT:
            _loaded.pop(next(iter(_loaded)))
        _loaded[key] = predictor
    return _loaded[key]


@cache
def _import_plugin(name: str) -> FrameworkPlugin:
    with gc_paused_for_import():  # only the import: modules are never collected, but an evicted model must be
        return find_plugin(name)


def _assigned_gpu() -> int | None:
    """Return the CUDA index of the GPU that Spark assigned to this task; None if Spark assigned no GPU."""
    from pyspark import TaskContext  # noqa: PLC0415  (decoding needs no Spark)

    task = TaskContext.get()
    resource = None if task is None else task.resources().get("gpu")
    return None if resource is None else device_number(resource.addresses, visible_devices())


def device_number(addresses: Sequence[str], visible: str | None) -> int | None:
    """Return the CUDA index of the first address; None if there is no address or CUDA cannot see its device.

    Args:
        addresses: the addresses that Spark assigned. A number is an index into the devices that the process sees.
        visible: the process's CUDA_VISIBLE_DEVICES; None if it is not set.
    """
    if not addresses:
        return None
    if addresses[0].isdecimal():
        return int(addresses[0])
    listed = [name.strip() for name in (visible or "").split(",")]
    return listed.index(addresses[0]) if addresses[0] in listed else None


def _application_folder() -> str | None:
    """Return the folder that Spark removes with the application (a killed task cannot clean up); None outside tasks."""
    from pyspark import SparkFiles, TaskContext  # noqa: PLC0415  (decoding needs no Spark)

    return None if TaskContext.get() is None else SparkFiles.getRootDirectory()


def _decode(array: pa.Array | npt.NDArray[np.generic], column: ColumnSpec) -> npt.NDArray[np.generic]:
    """Return the column in writable memory: frameworks alias their inputs, and Arrow's memory is read-only."""
    if isinstance(array, np.ndarray):
        return array
    if array.null_count and column.fill is None:
        raise DataError(
            f"Feature column {column.name!r} holds NULL in {array.null_count} of {counted(len(array), 'row')}, for "
            f"which there is no prediction. Drop these rows first (df.dropna(subset=[{column.name!r}])) or fill them "
            "(df.fillna)."
        )
    lengths = columns_of.lengths(array.drop_null() if array.null_count else array)
    length = column.shape[0] if column.shape else 0
    if lengths is not None and len(lengths) and not lengths.min() == lengths.max() == length:
        raise DataError(
            f"Feature column {column.name!r} has rows of length {columns_of.length_range(lengths)}; the model was "
            f"trained with rows of length {length}. Pad or cut them."
        )
    return columns_of.to_numpy(array, column, "the DataFrame").copy()


def _predict(
    predictor: Predictor, columns: dict[str, npt.NDArray[np.generic]], rows: int, spec: PredictSpec
) -> list[pa.Array]:
    """Return one array per output, without chunks, because a struct of chunks would require another copy."""
    parts: list[list[pa.Array]] = [[pa.array([], arrow_type)] for arrow_type in spec.types]
    for start in range(0, rows, spec.batch_size):
        piece = {name: array[start : start + spec.batch_size] for name, array in columns.items()}
        predictions = predictor.predict(piece)
        if len(predictions) != len(spec.outputs):
            raise ModelOutputError(
                f"The model or prediction_fn returned {counted(len(predictions), 'output')} for "
                f"{counted(len(spec.outputs), 'output column')} {[column.name for column in spec.outputs]}. Set "
                "output_cols and output_types to match."
            )
        count = len(next(iter(piece.values())))
        for index, (prediction, column, arrow_type) in enumerate(
            zip(predictions, spec.outputs, spec.types, strict=True)
        ):
            array = encode_output(with_rows(prediction, column, count), column, arrow_type)
            if len(array) != count:
                raise ModelOutputError(
                    f"Output column {column.name!r} has {counted(len(array), 'row')} for {counted(count, 'row')} of "
                    "the DataFrame; the first dimension of an output must be the rows."
                )
            parts[index].append(array)
    return [pieces[1] if len(pieces) == 2 else pa.concat_arrays(pieces) for pieces in parts]
