"""Weights of batches, and optimizer steps that accumulate the gradients of several batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from sparkhvd.comm import session
from sparkhvd.keras.exchange import is_overwritten, scaled


class GradientAccumulation:
    """Sums the gradients of batches until a batch ends the step.

    Keras can accumulate, too (``gradient_accumulation_steps``), but only in steps with a constant number of batches, so
    a step could continue into the next epoch. Its ``iterations`` also count batches, although optimizers and schedules
    expect steps.

    Args:
        position: returns whether the current batch ends the step, and the factor for the sums of the step's earlier
            batches; called once per batch.
        variables: the trained variables. The sums are not variables of the optimizer, so they are not saved.
    """

    def __init__(self, position: Callable[[], tuple[bool, float]], variables: Sequence[Any]) -> None:
        self._ask = position
        self._ends_step: Any = True  # of the batch that is being computed or traced, like the next one
        self._factor_of_sums: Any = 1.0
        self._constraints: dict[int, Callable[[Any], Any]] = {}  # by the ids of the variables
        self._sums = {id(v): keras.Variable(keras.ops.zeros(v.shape, v.dtype), trainable=False) for v in variables}

    def begin_batch(self, gradients: Sequence[Any]) -> None:
        """Determine whether this batch ends the step, and the factor for the sums."""
        if keras.config.backend() == "tensorflow":
            import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

            ask = self._ask  # TensorFlow keeps the function in memory, which must not refer to the sums
            position = tf.py_function(lambda *_: ask(), _dependency_on(gradients), [tf.bool, tf.float64])
            self._ends_step, self._factor_of_sums = (tf.ensure_shape(value, []) for value in position)
        else:
            self._ends_step, self._factor_of_sums = self._ask()

    def skipped_steps(self, dtype: str) -> Any:
        """Return 1 if this batch takes no step, else 0."""
        return 1 - keras.ops.cast(self._ends_step, dtype)

    @contextmanager
    def constraints_after_steps(self, variables: Sequence[Any]) -> Iterator[None]:
        """Keep Keras from applying the variables' constraints after every batch; ``accumulate`` applies them."""
        constrained = [(variable, variable.constraint) for variable in variables if variable.constraint is not None]
        self._constraints = {id(variable): constraint for variable, constraint in constrained}
        for variable, _ in constrained:
            variable.constraint = None
        try:
            yield
        finally:
            for variable, constraint in constrained:
                variable.constraint = constraint

    def accumulate(self, gradients: Sequence[Any], variables: Sequence[Any], take_step: Callable[..., None]) -> None:
        """Add the gradients to the sums; at the end of a step, call ``take_step`` with the sums and reset them."""
        sums = [self._sums[id(variable)] for variable in variables]
        added = [
            keras.ops.add(scaled(keras.ops.convert_to_tensor(total), self._factor_of_sums), gradient)
            for total, gradient in zip(sums, gradients, strict=True)
        ]

        def end() -> None:
            take_step(added, variables)
            for variable in variables:
                if (constraint := self._constraints.get(id(variable))) is not None:
                    variable.assign(constraint(variable))
            for total in sums:
                total.assign(keras.ops.zeros(total.shape, total.dtype))

        def keep() -> None:
            for total, value in zip(sums, added, strict=True):
                total.assign(value)

        keras.ops.cond(self._ends_step, end, keep)

    def new_values(self, of_batch: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return new values of the variables: the maxima over the batches of a step at its end, no change before.

        Args:
            of_batch: the new values after this batch alone, at least 0.
            variables: see ``is_overwritten``.
        """
        sums = [self._sums[id(variable)] for variable in variables]
        maxima = [keras.ops.maximum(total, value) for total, value in zip(sums, of_batch, strict=True)]
        choose = keras.ops.where
        values = [choose(self._ends_step, new, old) for new, old in zip(maxima, variables, strict=True)]
        for total, maximum in zip(sums, maxima, strict=True):
            total.assign(choose(self._ends_step, keras.ops.zeros_like(maximum), maximum))
        return values


class BatchWeight:
    """The weight of the batch being computed or traced: the mean over the ranks becomes the mean over all rows.

    Args:
        share: returns this rank's share of the rows of the step; called once per batch.
    """

    def __init__(self, share: Callable[[], float]) -> None:
        self._share = share
        self._of_loss: Any = None  # the weight of the current batch, if its loss is already weighted

    def weighted_loss(self, loss: Any) -> Any:
        """Return the loss of a batch with its weight."""
        self._of_loss = self._weight([loss])
        return scaled(loss, self._of_loss)

    def weighted_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of a batch with its weight; None stays None, and so do new values of variables."""
        weight, self._of_loss = self._of_loss, None
        if weight is None:  # in a training step that the user wrote
            weight = self._weight(gradients)
            gradients = [
                gradient if is_overwritten(variable) else scaled(gradient, weight)
                for gradient, variable in zip(gradients, variables, strict=True)
            ]
        elif not _is_accessible(weight):  # the user computes the loss in a graph of its own
            weight = self._weight(gradients)
        return list(gradients) if session.size() == 1 else _zero_unless(weight > 0, gradients)

    def _weight(self, after: Sequence[Any]) -> Any:
        """Return the weight, in a graph of TensorFlow as a tensor that is computed after the loss or the gradients.

        Before that, the share of the batch may be unknown.
        """
        share = self._share  # TensorFlow keeps the function in memory, which must not refer to tensors

        def weight() -> float:
            return share() * session.current().world.size

        if keras.config.backend() != "tensorflow":
            return weight()
        import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

        number = tf.stop_gradient(tf.py_function(lambda *_: weight(), _dependency_on(after), tf.float64))
        number.set_shape([])
        return number


def _is_accessible(number: Any) -> bool:
    """Return whether the current graph of TensorFlow, if any, can use a number."""
    if keras.config.backend() != "tensorflow":
        return True
    import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

    return tf.executing_eagerly() or number.graph is tf.compat.v1.get_default_graph()


def _zero_unless(has_rows: Any, gradients: Sequence[Any]) -> list[Any]:
    """Replace the gradients of a rank without rows with zeros: a product with 0 would keep NaN and infinity."""
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

        present = [gradient for gradient in gradients if gradient is not None]
        kept = iter(tf.cond(has_rows, lambda: present, lambda: [_zeros_like(gradient) for gradient in present]))
        return [None if gradient is None else next(kept) for gradient in gradients]
    if has_rows:
        return list(gradients)
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
