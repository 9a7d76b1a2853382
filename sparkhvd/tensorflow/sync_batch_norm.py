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
from sparkhvd.tensorflow.tensors import graph_name, outside_graph, without_autograph

Floats = npt.NDArray[np.float64]


@keras.saving.register_keras_serializable("sparkhvd")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]  # keras has no types
    """``keras.layers.BatchNormalization`` with statistics over the rows of all ranks.

    Ranks may have different numbers of rows, or none. In training mode, all ranks must run the layer the same number of
    times; in inference mode, the layer does not communicate. All ranks end with the same moving statistics. Gradients
    are exact if the ranks' losses have equal weight, as with ``DistributedOptimizer`` or ``DistributedGradientTape``
    and ``op=Average``.

    Accepts the arguments of ``keras.layers.BatchNormalization``. Importing ``sparkhvd.tensorflow`` registers the layer
    with ``keras.saving.load_model``.

    Args:
        process_set: the ranks that take part, all by default. It is not saved with the layer, because process sets end
            with their job; a loaded layer uses all ranks.

    Raises:
        ConfigError: Keras runs on a backend other than TensorFlow.
    """

    def __init__(self, *args: Any, process_set: ProcessSet | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if keras.config.backend() != "tensorflow":
            raise ConfigError(
                "SyncBatchNormalization needs Keras' TensorFlow backend, but Keras runs on "
                f"{keras.config.backend()!r}. Set KERAS_BACKEND=tensorflow before keras is imported."
            )
        self.supports_jit = False  # XLA cannot compile the exchange
        self._process_set = process_set
        self._has_rows: Callable[[], bool] | None = None

    def count_rows_if(self, has_rows: Callable[[], bool]) -> None:
        """Exclude this rank's rows from the statistics when ``has_rows()``, called once per training step, is false."""
        self._has_rows = has_rows

    @without_autograph
    def _moments(self, inputs: Any, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        # The call() of Keras' layer gets the mean and the variance of the batch from this method.
        x = tf.convert_to_tensor(inputs)
        included = None if mask is None else tf.cast(tf.expand_dims(mask, -1), tf.bool)
        moments: tuple[tf.Tensor, tf.Tensor] = _global_moments(
            x, included, self._reduction_axes, self._has_rows, self._process_set
        )
        return moments


def _global_moments(
    x: tf.Tensor,
    included: tf.Tensor | None,
    axes: Sequence[int],
    has_rows: Callable[[], bool] | None,
    process_set: ProcessSet | None,
) -> Any:
    """Return mean and variance per channel over all ranks.

    Their derivatives with respect to a value are 1 / n and 2 (value - mean) / n, where n is the number of values of all
    ranks. Therefore the backward pass only needs to sum the upstream gradients over the ranks.
    """
    name, is_masked = graph_name("sync_batch_normalization", None), included is not None

    def combine(*local_sums: tf.Tensor) -> Sequence[Array]:
        takes_part = has_rows is None or has_rows()
        local = np.stack([tensor.numpy().astype(np.float64) for tensor in local_sums])
        local = (local if takes_part else np.zeros_like(local))[None]
        parts = session.current().allgather(local, name=name, process_set=process_set)
        mean, variance, total = _combined(parts.astype(np.float64, copy=False))
        if not is_masked and not total.any():
            raise ValueError(
                "SyncBatchNormalization cannot compute batch statistics, because no rank has a row in this step."
            )
        share = takes_part / np.maximum(total, 1)
        return [array.astype(local_sums[1].numpy().dtype) for array in (mean, variance, share)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def moments(values: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Any]:
        local_sums = _local_sums(values, included, axes)
        result_types = [(tensor.dtype, tensor.shape) for tensor in local_sums]
        # The gradient functions below define all derivatives. In a graph, TensorFlow would otherwise try to
        # differentiate the Python function.
        mean, variance, share = map(tf.stop_gradient, outside_graph(combine, local_sums, result_types))

        # This function is for second derivatives: ``mean`` is a constant here, although it depends on the values.
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def centered(values: tf.Tensor) -> tuple[tf.Tensor, Any]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                summed = allreduce(
                    tf.reduce_sum(_masked(included, upstream), axes), op=ReduceOp.SUM, process_set=process_set
                )
                return upstream - _masked(included, _expanded(summed * share, values, axes))

            return values - _expanded(mean, values, axes), gradient

        def gradient(mean_gradient: tf.Tensor, variance_gradient: tf.Tensor) -> tf.Tensor:
            upstream = tf.stack([mean_gradient, variance_gradient])
            summed = allreduce(upstream, op=ReduceOp.SUM, process_set=process_set)
            by_mean, by_variance = tf.unstack(summed * share)
            deviations = centered(values)
            result = _expanded(by_mean, values, axes) + 2.0 * deviations * _expanded(by_variance, values, axes)
            return _masked(included, result)

        return (mean, variance), gradient

    return moments(x)


def _local_sums(values: tf.Tensor, included: tf.Tensor | None, axes: Sequence[int]) -> list[tf.Tensor]:
    """Return, per channel on this rank: number of values, mean, and sum of squared deviations from the mean."""
    sums = tf.reduce_sum(_masked(included, values), axes)
    if included is None:
        count = tf.zeros_like(sums) + tf.cast(tf.size(values) // tf.size(sums), sums.dtype)
    else:
        count = tf.reduce_sum(_masked(included, tf.ones_like(values)), axes)
    mean = tf.math.divide_no_nan(sums, count)
    deviations = _masked(included, values - _expanded(mean, values, axes))
    return [count, mean, tf.reduce_sum(tf.square(deviations), axes)]


def _combined(parts: Floats) -> tuple[Floats, Floats, Floats]:
    """Return mean, variance and number of values per channel from the local sums of all ranks.

    If a mask excludes all values, mean and variance are 0, as in Keras.
    The means and sums of squared deviations are combined by the formulas of Chan, Golub and LeVeque (1979), which keep
    their precision where the mean is much larger than the deviation.
    """
    counts, means, squares = (parts[:, index] for index in range(3))
    total = counts.sum(axis=0)
    divisor = np.maximum(total, 1)
    mean = (counts * means).sum(axis=0) / divisor
    return mean, (squares + counts * np.square(means - mean)).sum(axis=0) / divisor, total


def _masked(included: tf.Tensor | None, values: tf.Tensor) -> tf.Tensor:
    return values if included is None else tf.where(included, values, tf.zeros_like(values))


def _expanded(channels: tf.Tensor, like: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    shape = tf.tensor_scatter_nd_update(tf.shape(like), [[axis] for axis in axes], [1] * len(axes))
    return tf.reshape(channels, shape)
