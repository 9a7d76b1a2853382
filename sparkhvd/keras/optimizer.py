"""``DistributedOptimizer``: a Keras optimizer whose gradients are those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from sparkhvd._util.keras_layers import variables_of_layers
from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError
from sparkhvd.keras.batches import Gathering, weighted
from sparkhvd.keras.exchange import Exchange, gradient_exchange, scaled


@dataclass
class _Local:
    """The variables whose gradients stay this rank's own.

    Attributes:
        scale: whether their gradients are divided by the number of ranks.
        passes: what they are multiplied by, where the gradients of gathered batches are summed.
        process_set: the ranks that are counted.
        variables: by their ids.
    """

    scale: bool
    passes: int
    process_set: ProcessSet | None
    variables: dict[int, Any] = field(default_factory=dict)

    def factor(self) -> float:
        return self.passes / (session.current().channel(self.process_set).engine.size if self.scale else 1)


class ExchangingOptimizer:
    """What ``DistributedOptimizer`` adds to the class of the optimizer that it wraps."""

    _exchange: Exchange
    _local: _Local
    _applied_to: Sequence[Any]  # the variables of the gradients that are being applied
    _share: Callable[[], float] | None
    _loss_is_weighted: bool  # of the batch that is being computed, or traced
    _gathering: Gathering | None

    def weight_by(self, share: Callable[[], float], ends: Callable[[], bool] | None = None) -> None:
        """Weight every batch by its part of a step's rows, instead of counting all ranks alike.

        Args:
            share: called once per batch, in order; rows of this rank's batch / rows of all batches of all ranks that
                make the step, 0 for a rank without rows.
            ends: called after it; whether the batch is the last one of its step. None where each batch is a step. The
                optimizer has to be built for it.
        """
        self._share = share
        gathering = None if ends is None else Gathering(ends, self._trainable_variables)  # type: ignore[attr-defined]
        object.__setattr__(self, "_gathering", gathering)

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradients of a variable this rank's own: it belongs to a part of the model that each rank has."""
        self._local.variables[id(variable)] = variable

    def local_variables(self) -> list[Any]:
        """The variables whose gradients stay this rank's own, and what the optimizer, which is built, keeps of them."""
        trained = self._trainable_variables  # type: ignore[attr-defined]
        places = [place for place, variable in enumerate(trained) if id(variable) in self._local.variables]
        # Keras has no other way to find them than the lists in the order of the variables.
        kept = [each for each in vars(self).values() if isinstance(each, list) and len(each) == len(trained)]
        return [each[place] for each in kept for place in places]

    def scale_loss(self, loss: Any) -> Any:
        """Weight the loss, so that gradients that cross ranks on their way back, as those of means do, are weighted."""
        if self._share is not None:
            object.__setattr__(self, "_loss_is_weighted", True)
            (loss,) = weighted([loss], self._share)
        return super().scale_loss(loss)  # type: ignore[misc]  # of the optimizer's own class

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Apply the gradients of all ranks."""
        if self._share is not None and not self._loss_is_weighted:  # by a training step of the user's own
            grads = weighted(list(grads), self._share)
        object.__setattr__(self, "_loss_is_weighted", False)
        if self._gathering is not None:
            self._gathering.begin_batch(grads)
        super().apply(grads, trainable_variables)  # type: ignore[misc]  # of the optimizer's own class
        if self._gathering is not None:  # Keras has counted a step
            steps: Any = self._iterations  # type: ignore[attr-defined]
            steps.assign_sub(self._gathering.steps_left_out(steps.dtype))

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        object.__setattr__(self, "_applied_to", trainable_variables)
        take_step = super()._backend_apply_gradients  # type: ignore[misc]
        if self._gathering is None:
            take_step(grads, trainable_variables)
        else:
            self._gathering.gather(grads, trainable_variables, take_step)

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        # Keras calls this on every step's gradients, after they were accumulated and before anything else is done with
        # them: clipping then sees what one process would see.
        clipped = super()._clip_gradients  # type: ignore[misc]
        if not self._local.variables:
            return clipped(self._exchange(grads))
        own = [id(variable) in self._local.variables for variable in self._applied_to]
        # Each by itself: a norm over both would differ between the ranks, and with it what they share.
        shared = iter(clipped(self._exchange([grad for grad, mine in zip(grads, own, strict=True) if not mine])))
        factor = self._local.factor()
        kept = iter(clipped([scaled(grad, factor) for grad, mine in zip(grads, own, strict=True) if mine]))
        return [next(kept if mine else shared) for mine in own]


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
    process_set: ProcessSet | None = None,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Make ``optimizer`` apply the gradients of all ranks, and return it.

    The optimizer keeps its state, its variables and the name of its class, so that a saved model loads without
    sparkhvd. Compile the model after wrapping, without ``jit_compile=True``.

    Args:
        optimizer: the optimizer, which is changed.
        name: tells two optimizers of one program apart; equal on all ranks.
        compression: what gradients travel as (``hvd.Compression``, that of the backend).
        sparse_as_dense: whether the gradients of embeddings are made dense first; TensorFlow backend only.
        backward_passes_per_step: batches whose gradients are gathered on the rank before they are exchanged.
        op: ``Average`` or ``Sum`` over the ranks.
        gradient_predivide_factor: with ``Average``, divides before the sum and multiplies after it.
        average_aggregated_gradients: whether the gradients of the gathered batches are averaged instead of summed.
        process_set: the ranks that train this model together, all by default.
        scale_local_gradients: whether gradients that stay this rank's own (``register_local_var``) are divided by the
            number of ranks, as they are in the gradient of the mean of all ranks' losses.

    Raises:
        ConfigError: settings that contradict each other, or an optimizer that is distributed already.
    """
    if isinstance(optimizer, ExchangingOptimizer):
        raise ConfigError("This optimizer is distributed already; wrap the plain one.")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(f"{optimizer!r} is not a Keras optimizer; make one with keras.optimizers.")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError("Wrap the optimizer inside of LossScaleOptimizer, not the LossScaleOptimizer itself.")
    refuse_several(optimizer)
    exchange = gradient_exchange(
        f"DistributedOptimizer.{name or optimizer.name}",
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        process_set,
    )
    _accumulate(optimizer, backward_passes_per_step)
    passes = 1 if average_aggregated_gradients else backward_passes_per_step
    if passes > 1:
        exchange = _times(passes, exchange)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (ExchangingOptimizer, kind), {"__module__": kind.__module__})
    # Past Keras' own bookkeeping of attributes, which is for variables and layers.
    object.__setattr__(optimizer, "_exchange", exchange)
    object.__setattr__(optimizer, "_local", _Local(scale_local_gradients, passes, process_set))
    object.__setattr__(optimizer, "_share", None)
    object.__setattr__(optimizer, "_loss_is_weighted", False)
    object.__setattr__(optimizer, "_gathering", None)
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802  the name is Horovod's
    optimizer: keras.optimizers.Optimizer, *, local_layers: Any = None, **options: Any
) -> keras.optimizers.Optimizer:
    """``DistributedOptimizer``, but for the variables of ``local_layers``, whose gradients stay this rank's own.

    Args:
        optimizer: the optimizer, which is changed.
        local_layers: a Keras layer or several, which have their variables already.
        options: see ``DistributedOptimizer``.

    Raises:
        ConfigError: as ``DistributedOptimizer``.
    """
    variables = variables_of_layers(local_layers)
    DistributedOptimizer(optimizer, **options)
    for variable in variables:
        optimizer.register_local_var(variable)
    return optimizer


def refuse_several(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse an optimizer that is made of others, whose gradients would not be exchanged.

    Raises:
        ConfigError: it is.
    """
    # Keras has it since 3.11.
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise ConfigError("A MultiOptimizer cannot be distributed; use one optimizer for all layers.")


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
    return lambda gradients: [scaled(gradient, factor) for gradient in exchange(gradients)]
