"""Batches as a ``tf.data.Dataset``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from sparkhvd.data.schema import columns
from sparkhvd.errors import SchemaError

if TYPE_CHECKING:
    from sparkhvd.data.read.readers import RowSource


def dataset(source: RowSource, epochs: int) -> tf.data.Dataset:
    """Return the batches of the first ``epochs`` epochs of a source."""
    sparse = columns.sparse_widths(source.schema)
    rows = weakref.proxy(source)  # TensorFlow keeps the function below until the process ends

    def batches() -> Iterator[dict[str, Any]]:
        for epoch in range(epochs):
            for batch in rows.epoch(epoch):
                yield {name: _value(array, sparse.get(name)) for name, array in batch.columns.items()}

    signature = {name: _spec(name, array, sparse.get(name)) for name, array in source.sample.items()}
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    dataset._sparkhvd_source = source  # noqa: SLF001  (pipelines and iterators keep the dataset that they are made of)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(source.steps() * epochs)).with_options(options)
    return without_tuning(dataset)


def without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return the pipeline without autotuning, which stays off in pipelines that are derived from it.

    With autotuning on a busy machine, closing an iterator sometimes holds the GIL for up to a minute: TensorFlow wakes
    the tuning thread before it marks the iterator as cancelled, so the thread may see no reason to end and sleep again.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def sparse_tensor(array: np.ndarray[Any, Any], width: int, dtype: str = "float64") -> tf.SparseTensor:
    """Return a sparse column's rows (see ``sparkhvd.data.schema.columns``) as a tensor of shape ``(rows, width)``."""
    rows, positions, values = columns.coordinates(array)
    return tf.SparseTensor(np.stack([rows, positions], axis=1), values.astype(dtype, copy=False), (len(array), width))


def _value(array: np.ndarray[Any, Any], width: int | None) -> np.ndarray[Any, Any] | tf.SparseTensor:
    if array.dtype.names and width is not None:
        return sparse_tensor(array, width)
    return array.astype("S") if array.dtype == object and not len(array) else array


def _spec(name: str, array: np.ndarray[Any, Any], width: int | None) -> tf.TensorSpec | tf.SparseTensorSpec:
    if array.dtype.names and width is not None:
        return tf.SparseTensorSpec((None, width), tf.float64)
    if array.dtype == object and isinstance(array.flat[0], str | bytes):
        return tf.TensorSpec((None, *array.shape[1:]), tf.string)
    try:
        kind = tf.as_dtype(array.dtype)
    except TypeError as error:
        raise SchemaError(
            f"Column {name!r} ({array.dtype}) cannot become a tensor; leave it out (columns=) or convert it to a "
            "number (transformation_fn=)."
        ) from error
    return tf.TensorSpec((None, *array.shape[1:]), kind)
