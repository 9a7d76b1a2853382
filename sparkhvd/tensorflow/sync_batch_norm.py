"""Batch normalization over the batch of all ranks, as a Keras layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import Array, ReduceOp
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError
from sparkhvd.tensorflow.operations import allreduce
from sparkhvd.tensorflow.tensors import as_written, graph_name, outside_graph

Numbers = npt.NDArray[np.float64]


@keras.saving.register_keras_serializable("sparkhvd")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]  # keras has no types
    """``keras.layers.BatchNormalization`` whose statistics are those of all ranks' rows together.

    Ranks may have different numbers of rows, also none. In training mode every rank has to run the layer as often as
    the others; otherwise it works alone. All ranks end with the same moving statistics. Gradients are exact where the
    ranks' losses count alike, as under ``DistributedOptimizer`` and ``DistributedGradientTape`` with ``op=Average``.

    Takes the arguments of ``keras.layers.BatchNormalization``. Importing ``sparkhvd.tensorflow`` makes the layer known
    to ``keras.saving.load_model``.

    Args:
        process_set: the ranks that take part, all by default. It is not saved with the layer, as process sets end with
            their job: a loaded layer is for all ranks.

    Raises:
        ConfigError: Keras runs on another backend than TensorFlow.
    """

    def __init__(self, *args: Any, process_set: ProcessSet | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if keras.config.backend() != "tensorflow":
            raise ConfigError(
                f"SyncBatchNormalization needs Keras' TensorFlow backend, but Keras runs on {keras.config.backend()!r}."
            )
        self.supports_jit = False  # XLA cannot compile the exchange
        self._process_set = process_set
        self._counts: Callable[[], bool] | None = None

    def count_rows_if(self, counts: Callable[[], bool]) -> None:
        """Leave rows out of the statistics for which ``counts`` says no; it is asked once in every training step."""
        self._counts = counts

    @as_written
    def _moments(self, inputs: Any, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        # Keras' own method asks this one for the mean and the variance of the batch.
        x = tf.convert_to_tensor(inputs)
        included = None if mask is None else tf.cast(tf.expand_dims(mask, -1), tf.bool)
        of_all = (included, self._reduction_axes, self._counts, self._process_set)
        moments: tuple[tf.Tensor, tf.Tensor] = _moments_of_all(x, *of_all)
        return moments


def _moments_of_all(
    x: tf.Tensor,
    included: tf.Tensor | None,
    axes: Sequence[int],
    counts: Callable[[], bool] | None,
    process_set: ProcessSet | None,
) -> Any:
    """Mean and variance per channel over all ranks.

    Their derivatives by a value are 1 / n and 2 (value - mean) / n, where n is the number of values of all ranks; so
    what comes back from behind has to be summed over the ranks, and nothing else has to be exchanged.
    """
    name = graph_name("sync_batch_normalization", None, x)

    def join(*own: tf.Tensor) -> Sequence[Array]:
        present = counts is None or counts()
        mine = np.stack([each.numpy().astype(np.float64) for each in own])
        mine = (mine if present else np.zeros_like(mine))[None]
        parts = session.current().allgather(mine, name=name, process_set=process_set)
        mean, variance, total = _joined(parts.astype(np.float64, copy=False))
        share = present / np.maximum(total, 1)
        return [each.astype(own[1].numpy().dtype) for each in (mean, variance, share)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def moments(values: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Any]:
        own = _own_sums(values, included, axes)
        mean, variance, share = outside_graph(join, own, [(each.dtype, each.shape) for each in own])

        def gradient(of_mean: tf.Tensor, of_variance: tf.Tensor) -> tf.Tensor:
            summed = allreduce(tf.stack([of_mean, of_variance]), op=ReduceOp.SUM, process_set=process_set)
            by_mean, by_variance = tf.unstack(summed * share)
            deviations = values - _spread(mean, values, axes)
            found = _spread(by_mean, values, axes) + 2.0 * deviations * _spread(by_variance, values, axes)
            return _only(included, found)

        return (mean, variance), gradient

    return moments(x)


def _own_sums(values: tf.Tensor, included: tf.Tensor | None, axes: Sequence[int]) -> list[tf.Tensor]:
    """Of each channel on this rank: number of values, mean, and sum of the squared deviations from it."""
    sums = tf.reduce_sum(_only(included, values), axes)
    if included is None:
        count = tf.zeros_like(sums) + tf.cast(tf.size(values) // tf.size(sums), sums.dtype)
    else:
        count = tf.reduce_sum(_only(included, tf.ones_like(values)), axes)
    mean = tf.math.divide_no_nan(sums, count)
    deviations = _only(included, values - _spread(mean, values, axes))
    return [count, mean, tf.reduce_sum(tf.square(deviations), axes)]


def _joined(parts: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Mean, variance and number of values per channel, of (number, mean, squares) per rank and channel.

    The means and sums of squared deviations are joined as by Chan, Golub, LeVeque (1979), which does not lose digits
    where the mean is large beside the deviation.
    """
    counts, means, squares = (parts[:, index] for index in range(3))
    total = counts.sum(axis=0)
    if not total.any():
        raise ValueError("SyncBatchNormalization has nothing to normalize by: no rank has a row in this step.")
    divisor = np.maximum(total, 1)
    mean = (counts * means).sum(axis=0) / divisor
    return mean, (squares + counts * np.square(means - mean)).sum(axis=0) / divisor, total


def _only(included: tf.Tensor | None, values: tf.Tensor) -> tf.Tensor:
    return values if included is None else tf.where(included, values, tf.zeros_like(values))


def _spread(of_channels: tf.Tensor, like: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    shape = tf.tensor_scatter_nd_update(tf.shape(like), [[axis] for axis in axes], [1] * len(axes))
    return tf.reshape(of_channels, shape)
