"""What a batch is in a step: its weight, and the steps that are made of several batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from sparkhvd.comm import session
from sparkhvd.keras.exchange import scaled


class Gathering:
    """Sums the gradients of batches until one ends the step.

    Keras can do so too (``gradient_accumulation_steps``), but in steps of the same number of batches only, so that one
    would go on from epoch to epoch; and it counts batches where its optimizers and schedules want to know steps.

    Args:
        ends: asked once per batch, whether it ends the step.
        variables: that are trained; the sums are none of the optimizer's own variables, which are saved.
    """

    def __init__(self, ends: Callable[[], bool], variables: Sequence[Any]) -> None:
        self._ask = ends
        self._ends: Any = True  # of the batch that is being computed, or traced
        self._sums = {
            id(each): keras.Variable(keras.ops.zeros(each.shape, each.dtype), trainable=False) for each in variables
        }

    def begin_batch(self, gradients: Sequence[Any]) -> None:
        """Find out whether this batch ends the step."""
        if keras.config.backend() == "tensorflow":
            import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

            self._ends = tf.py_function(lambda *_: self._ask(), _first_number(gradients), tf.bool)
            self._ends.set_shape([])
        else:
            self._ends = self._ask()

    def steps_left_out(self, dtype: str) -> Any:
        """1 where this batch takes no step, else 0."""
        return 1 - keras.ops.cast(self._ends, dtype)

    def gather(self, gradients: Sequence[Any], variables: Sequence[Any], take_step: Callable[..., None]) -> None:
        """Add up the gradients; at the end of the step, take it with the sums."""
        sums = [self._sums[id(variable)] for variable in variables]
        added = [keras.ops.add(sums[index], gradient) for index, gradient in enumerate(gradients)]

        def end() -> None:
            take_step(added, variables)
            for each in sums:
                each.assign(keras.ops.zeros(each.shape, each.dtype))

        def go_on() -> None:
            for each, value in zip(sums, added, strict=True):
                each.assign(value)

        keras.ops.cond(self._ends, end, go_on)


def weighted(gradients: list[Any], share: Callable[[], float]) -> list[Any]:
    """Gradients, or a loss, times what makes the plain mean over the ranks the mean over all rows."""

    def factor() -> float:
        return share() * session.current().world.size

    if keras.config.backend() == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

        # Asked at every run of the graph, once the step has gradients: before, the step might not have its rows yet.
        number: Any = tf.stop_gradient(tf.py_function(lambda *_: factor(), _first_number(gradients), tf.float32))
        number.set_shape([])
        return [None if g is None else scaled(g, tf.cast(number, g.dtype)) for g in gradients]
    number = factor()
    return [scaled(gradient, number) for gradient in gradients]


def _first_number(gradients: Sequence[Any]) -> list[Any]:
    """What an operation can depend on that has to wait for the gradients, or the loss."""
    import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

    found = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    return [tf.stop_gradient(tf.reshape(each, [-1])[:1]) for each in found[:1]]
