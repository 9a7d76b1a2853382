"""``DistributedOptimizer``: a Keras optimizer whose gradients are those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from sparkhvd.comm import session
from sparkhvd.comm.buffers import ReduceOp
from sparkhvd.errors import ConfigError
from sparkhvd.keras.exchange import Exchange, gradient_exchange


class ExchangingOptimizer:
    """What ``DistributedOptimizer`` adds to the class of the optimizer that it wraps."""

    _exchange: Exchange
    _share: Callable[[], float] | None

    def weight_by(self, share: Callable[[], float]) -> None:
        """Weight every step by this rank's part of the global batch, instead of counting all ranks alike.

        Args:
            share: called once per step, in order; rows of this rank / rows of all ranks, 0 for a rank without rows.
        """
        self._share = share

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Apply the gradients of all ranks."""
        if self._share is not None:
            grads = _weighted(list(grads), self._share)
        super().apply(grads, trainable_variables)  # type: ignore[misc]  # of the optimizer's own class

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        # Keras calls this on every step's gradients, after they were accumulated and before anything else is done with
        # them: clipping then sees what one process would see.
        return super()._clip_gradients(self._exchange(grads))  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802  the name is Horovod's
    optimizer: keras.optimizers.Optimizer,
    *,
    name: str | None = None,
    compression: Any = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
) -> keras.optimizers.Optimizer:
    """Make ``optimizer`` apply the gradients of all ranks, and return it.

    The optimizer keeps its state, its variables and the name of its class, so that a saved model loads without
    sparkhvd. Compile the model after wrapping, without ``jit_compile=True``.

    Args:
        optimizer: the optimizer, which is changed.
        name: tells two optimizers of one program apart; equal on all ranks.
        compression: what gradients travel as (``sparkhvd.tensorflow.Compression``); TensorFlow backend only.
        sparse_as_dense: whether the gradients of embeddings are made dense first; TensorFlow backend only.
        backward_passes_per_step: batches whose gradients are gathered on the rank before they are exchanged.
        op: ``Average`` or ``Sum`` over the ranks.
        gradient_predivide_factor: with ``Average``, divides before the sum and multiplies after it.
        average_aggregated_gradients: whether the gradients of the gathered batches are averaged instead of summed.

    Raises:
        ConfigError: settings that contradict each other, or an optimizer that is distributed already.
    """
    if isinstance(optimizer, ExchangingOptimizer):
        raise ConfigError("This optimizer is distributed already; wrap the plain one.")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(f"{optimizer!r} is not a Keras optimizer; make one with keras.optimizers.")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError("Wrap the optimizer inside of LossScaleOptimizer, not the LossScaleOptimizer itself.")
    exchange = gradient_exchange(
        f"DistributedOptimizer.{name or optimizer.name}", compression, sparse_as_dense, op, gradient_predivide_factor
    )
    _accumulate(optimizer, backward_passes_per_step)
    if backward_passes_per_step > 1 and not average_aggregated_gradients:
        exchange = _times(backward_passes_per_step, exchange)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (ExchangingOptimizer, kind), {"__module__": kind.__module__})
    # Past Keras' own bookkeeping of attributes, which is for variables and layers.
    object.__setattr__(optimizer, "_exchange", exchange)
    object.__setattr__(optimizer, "_share", None)
    return optimizer


def _accumulate(optimizer: keras.optimizers.Optimizer, passes: int) -> None:
    if passes < 1:
        raise ConfigError(f"backward_passes_per_step={passes} is not at least 1.")
    if passes == 1:
        return
    if optimizer.built:
        raise ConfigError("backward_passes_per_step needs an optimizer that has not taken a step yet.")
    if optimizer.gradient_accumulation_steps:
        raise ConfigError("The optimizer has gradient_accumulation_steps already; give one of the two.")
    optimizer.gradient_accumulation_steps = passes


def _times(factor: float, exchange: Exchange) -> Exchange:
    return lambda gradients: [None if g is None else g * factor for g in exchange(gradients)]


def _weighted(gradients: list[Any], share: Callable[[], float]) -> list[Any]:
    """The gradients times what makes their plain mean over the ranks the mean over all rows."""

    def factor() -> float:
        return share() * session.current().world.size

    if keras.config.backend() == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

        # Asked at every run of the graph, once the step has gradients: before, the step might not have its rows yet.
        after = [_any_of(g) for g in gradients if g is not None]
        number: Any = tf.py_function(lambda *_: factor(), after[:1], tf.float32)
        number.set_shape([])
        return [None if g is None else _scaled(g, tf.cast(number, g.dtype)) for g in gradients]
    number = factor()
    return [None if g is None else g * number for g in gradients]


def _scaled(gradient: Any, factor: Any) -> Any:
    import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _any_of(gradient: Any) -> Any:
    """At most one number of a gradient."""
    import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

    return tf.reshape(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient, [-1])[:1]
