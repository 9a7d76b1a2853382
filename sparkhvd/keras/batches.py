"""Weights of batches, and optimizer steps that accumulate the gradients of several batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from sparkhvd.comm import session
from sparkhvd.keras.exchange import scaled


class GradientAccumulation:
    """Sums the gradients of batches until a batch ends the step.

    Keras can accumulate, too (``gradient_accumulation_steps``), but only in steps with a constant number of batches, so
    a step could continue into the next epoch. Its ``iterations`` also count batches, although optimizers and schedules
    expect steps.

    Args:
        ends_step: returns whether the current batch ends the step; called once per batch.
        variables: the trained variables. The sums are not variables of the optimizer, so they are not saved.
    """

    def __init__(self, ends_step: Callable[[], bool], variables: Sequence[Any]) -> None:
        self._ask = ends_step
        self._ends_step: Any = True  # of the batch that is being computed or traced
        self._sums = {id(v): keras.Variable(keras.ops.zeros(v.shape, v.dtype), trainable=False) for v in variables}

    def begin_batch(self, gradients: Sequence[Any]) -> None:
        """Determine whether this batch ends the step."""
        if keras.config.backend() == "tensorflow":
            import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

            ask = self._ask  # TensorFlow keeps the function in memory, which must not refer to the sums
            self._ends_step = tf.py_function(lambda *_: ask(), _dependency_on(gradients), tf.bool)
            self._ends_step.set_shape([])
        else:
            self._ends_step = self._ask()

    def skipped_steps(self, dtype: str) -> Any:
        """Return 1 if this batch takes no step, else 0."""
        return 1 - keras.ops.cast(self._ends_step, dtype)

    def accumulate(self, gradients: Sequence[Any], variables: Sequence[Any], take_step: Callable[..., None]) -> None:
        """Add the gradients to the sums; at the end of a step, call ``take_step`` with the sums and reset them."""
        sums = [self._sums[id(variable)] for variable in variables]
        added = [keras.ops.add(sums[index], gradient) for index, gradient in enumerate(gradients)]

        def end() -> None:
            take_step(added, variables)
            for total in sums:
                total.assign(keras.ops.zeros(total.shape, total.dtype))

        def keep() -> None:
            for total, value in zip(sums, added, strict=True):
                total.assign(value)

        keras.ops.cond(self._ends_step, end, keep)


def weighted(gradients: list[Any], share: Callable[[], float]) -> list[Any]:
    """Scale gradients, or a loss, such that the mean over the ranks is the mean over all rows."""

    def factor() -> float:
        return share() * session.current().world.size

    if keras.config.backend() == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

        # TensorFlow calls ``factor`` at every run of the graph, after it has computed the loss. Before that, the share
        # of the batch may be unknown.
        number: Any = tf.stop_gradient(tf.py_function(lambda *_: factor(), _dependency_on(gradients), tf.float64))
        number.set_shape([])
        return [None if g is None else scaled(g, tf.cast(number, g.dtype)) for g in gradients]
    number = factor()
    return [scaled(gradient, number) for gradient in gradients]


def zero_without_rows(gradients: list[Any], share: Callable[[], float]) -> list[Any]:
    """Replace the gradients of a rank whose share is 0 with zeros: a product with 0 would keep NaN and infinity."""
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

        present = [gradient for gradient in gradients if gradient is not None]
        has_rows = tf.py_function(lambda *_: share() > 0, _dependency_on(gradients), tf.bool)
        has_rows.set_shape([])
        kept = iter(tf.cond(has_rows, lambda: present, lambda: [_zeros_like(gradient) for gradient in present]))
        return [None if gradient is None else next(kept) for gradient in gradients]
    if share() > 0:
        return gradients
    return [None if gradient is None else keras.ops.zeros_like(gradient) for gradient in gradients]


def _zeros_like(gradient: Any) -> Any:
    import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.zeros_like(gradient.values), gradient.indices, gradient.dense_shape)
    return tf.zeros_like(gradient)


def _dependency_on(gradients: Sequence[Any]) -> list[Any]:
    """Return an input that makes an operation wait for the first of the gradients, or for the loss."""
    import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

    tensors = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    return [tf.stop_gradient(tf.reshape(tensor, [-1])[:1]) for tensor in tensors[:1]]
