"""Losses that divide by the number of unmasked values (masks, ignored classes), over the rows of all ranks.

Such a loss divides by a different number on every rank. Therefore a rank's loss is weighted by its share of the
divisors of all ranks, instead of its share of the rows.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.errors import ParamError
from sparkhvd.estimators.keras.dataset import BatchDataset


class CurrentBatch:
    """The current batch while a training or validation step runs."""

    def __init__(self) -> None:
        self._batch: tuple[BatchDataset, int] | None = None
        # The rows and divisors of all ranks in the batches of the step so far; empty without masks.
        self._divided: dict[int, tuple[int, float]] = {}

    def begin(self, data: BatchDataset, batch: int) -> None:
        """Begin a batch that all ranks compute."""
        if data.begins_step(batch):
            self._divided.clear()
        self._batch = data, batch

    def end(self) -> None:
        """End the batch; a callback computes all later losses, on this rank alone."""
        self._batch = None

    def share(self) -> float:
        """Return this rank's weight in the step: its rows as a fraction of all ranks' rows in the batch's step.

        If the loss divides by unmasked values, which are unknown for the next batches of the step, the weight is that
        in a step that ends with this batch; see ``position``. Ranks that train a batch in a callback have equal shares.
        """
        if self._batch is None:
            return 1.0 / session.current().world.size
        part = self._divided_part()
        return self._batch[0].share_of(self._batch[1]) if part is None else self.share_of_batch() * part

    def _divided_part(self) -> float | None:
        """Return the divisor of the batch, as a fraction of those of the step so far; None without masks."""
        if self._batch is None or self._batch[1] not in self._divided:
            return None
        own_rows, own_divisor = self._divided[self._batch[1]]
        divisors = sum(divisor for _, divisor in self._divided.values())
        rows = sum(batch_rows for batch_rows, _ in self._divided.values())
        return own_divisor / divisors if divisors else own_rows / rows

    def share_of_batch(self) -> float:
        """Return this rank's rows in the batch, as a fraction of all ranks' rows in the batch."""
        if self._batch is None:
            return self.share()
        rows, global_rows = self._batch[0].rows_of(self._batch[1])
        return rows / global_rows

    def position(self) -> tuple[bool, float]:
        """Return whether the batch is the last one of its step, and the factor for the sums of the batches before it.

        The factor reduces the weights of the earlier batches to those in a step that ends with this batch.
        """
        ends, part = self._batch is None or self._batch[0].is_end_of_step(self._batch[1]), self._divided_part()
        return ends, 1.0 if part is None else 1.0 - part

    def has_rows(self) -> bool:
        """Return whether this rank has rows in the batch."""
        return self.share_of_batch() > 0

    def factor(self, divisor: float, name: str) -> float:
        """Return the factor from this rank's share of the rows to its share of the divisors; collective in a batch."""
        if self._batch is None:
            return 1.0
        data, batch = self._batch
        rows, global_rows = data.rows_of(batch)
        own = divisor if rows else 0.0
        total = float(session.current().allreduce(np.array([own]), ReduceOp.SUM, name=name)[0])
        self._divided[batch] = global_rows, total
        return own / total * global_rows / rows if rows and total else 0.0


def divide_over_ranks(model: keras.Model, current: CurrentBatch, *, accumulates: bool = False) -> None:
    """Make the losses of a compiled model divide by the unmasked values of all ranks.

    Args:
        model: the model.
        current: the batch that the model computes.
        accumulates: whether a step has several batches. Their sum of gradients has one divisor, so a model with several
            losses may then have no masks.
    """
    compiled = model._compile_loss  # noqa: SLF001  (compile resolves losses when it sees the first outputs)
    if compiled is None:
        return
    build = compiled.build

    def build_and_wrap(*args: keras.KerasTensor) -> None:
        build(*args)
        refuses_masks = accumulates and len(compiled._flat_losses) > 1  # noqa: SLF001
        losses = [
            entry._replace(loss=_divided_over_ranks(entry.loss, current, f"loss divisor {index}", refuses_masks))
            for index, entry in enumerate(compiled._flat_losses)  # noqa: SLF001
        ]
        if compiled.metrics:  # the means of the losses, if there are several
            losses = [
                entry._replace(loss=_with_mean_by_rows(entry.loss, mean))
                for entry, mean in zip(losses, compiled.metrics, strict=True)
            ]
        compiled._flat_losses = losses  # noqa: SLF001

    compiled.build = build_and_wrap


def _divided_over_ranks(
    loss: keras.losses.Loss, current: CurrentBatch, name: str, refuses_masks: bool
) -> Callable[..., keras.KerasTensor]:
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        unchanged: Callable[..., keras.KerasTensor] = loss  # a user-defined __call__ reduces the loss itself
        return unchanged
    wrapped = object.__new__(type(loss))  # Keras copies by serialization, which must find the class by its name
    vars(wrapped).update(vars(loss))

    def compute(
        labels: keras.KerasTensor, outputs: keras.KerasTensor, weights: keras.KerasTensor | None = None
    ) -> keras.KerasTensor:
        computed: list[keras.KerasTensor] = []
        # Keras would align the weights of rows with the last dimension of the losses.
        is_aligned = weights is not None and loss.reduction != "mean_with_sample_weight"

        def call(*args: keras.KerasTensor) -> keras.KerasTensor:
            computed.append(loss.call(*args))
            return _weighted(computed[-1], weights) if is_aligned else computed[-1]

        wrapped.call = call
        value = wrapped(labels, outputs, None if is_aligned else weights)
        divisor = _divisor([_mask(outputs), _mask(computed.pop())])
        if divisor is None or getattr(getattr(divisor, "device", None), "type", None) == "meta":
            return value
        if refuses_masks:
            raise ParamError(
                f"The loss {loss.name!r} has a mask, and the model has several losses. backward_passes_per_step > 1 "
                "cannot accumulate such gradients, because every loss divides by its own number of unmasked values. "
                "Set backward_passes_per_step=1, or multiply the losses by the mask in a custom loss."
            )
        return value * keras.ops.cast(_constant(divisor, lambda number: current.factor(number, name)), value.dtype)

    return compute


def _with_mean_by_rows(
    loss: Callable[..., keras.KerasTensor], mean: keras.metrics.Mean
) -> Callable[..., keras.KerasTensor]:
    """Return the loss, and make ``mean`` weight each value by the rows; Keras updates ``mean`` after every call.

    In a graph of TensorFlow, the number of rows is unknown, and Keras would weight all batches equally.
    """
    rows: keras.KerasTensor | int = 0  # the rows of the latest call of the loss
    update = mean.update_state

    def compute(
        labels: keras.KerasTensor, outputs: keras.KerasTensor, weights: keras.KerasTensor | None = None
    ) -> keras.KerasTensor:
        nonlocal rows
        rows = keras.ops.shape(keras.tree.flatten(outputs)[0])[0]
        return loss(labels, outputs, weights)

    def update_by_rows(value: keras.KerasTensor, sample_weight: int | None = None) -> None:  # noqa: ARG001
        update(value, sample_weight=rows)

    mean.update_state = update_by_rows
    return compute


def _weighted(losses: keras.KerasTensor, weights: keras.KerasTensor) -> keras.KerasTensor:
    """Multiply losses by weights; weights without the last dimensions apply to all values of a row.

    Raises:
        ParamError: the loss is one number for all rows.
    """
    if len(losses.shape) == 0:
        raise ParamError(
            "The loss returns one number for all rows of a batch, so sample_weight_col cannot weight the rows. Return "
            "one value per row, or leave sample_weight_col out."
        )
    shape, missing = keras.ops.shape(losses), len(losses.shape) - len(weights.shape)
    shape = (*keras.ops.shape(weights), *[1] * missing) if missing >= 0 else shape
    weighted = losses * keras.ops.reshape(keras.ops.cast(weights, losses.dtype), shape)
    if (mask := _mask(losses)) is not None:
        weighted._keras_mask = mask  # noqa: SLF001  (Keras reads the mask of a loss there)
    return weighted


def _mask(values: keras.KerasTensor) -> keras.KerasTensor | None:
    return getattr(values, "_keras_mask", None)


def _divisor(masks: list[keras.KerasTensor | None]) -> keras.KerasTensor | None:
    """Return the number of unmasked values, or None without masks."""
    weights = [keras.ops.cast(mask, "float32") for mask in masks if mask is not None]
    if not weights:
        return None
    return keras.ops.sum(weights[0] if len(weights) == 1 else weights[0] * weights[1])


def _constant(number: keras.KerasTensor, function: Callable[[float], float]) -> keras.KerasTensor | float:
    """Call a function with a number, also in every run of a graph, and return the result as a constant."""
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

        from sparkhvd.tensorflow.tensors import outside_graph  # noqa: PLC0415

        scalar = (tf.float32, tf.TensorShape([]))
        (result,) = outside_graph(
            lambda value: [np.float32(function(float(value)))], [tf.stop_gradient(number)], [scalar]
        )
        return tf.stop_gradient(result)
    return function(float(number.detach()))
