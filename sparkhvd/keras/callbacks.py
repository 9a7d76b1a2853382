"""Callbacks for ``model.fit`` on every rank; names and meanings are Horovod's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.errors import ConfigError
from sparkhvd.keras.optimizer import ExchangingOptimizer

logger = logging.getLogger(__name__)


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Starts all ranks from the weights and the optimizer of ``root_rank``; what is local to a rank stays.

    They are broadcast before the first step. A model that gets its variables from its first batch (a ``Sequential``
    without an ``Input``, a subclass that has not been called) has none by then: its ranks continue from the state of
    ``root_rank`` after the first step.

    Args:
        root_rank: the rank whose variables count.
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._done = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Broadcast before the first step, if the model has all its variables."""
        if not self._done and _is_built(self.model):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Broadcast after the first step what was built in it."""
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        self._done = True
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        variables = [*self.model.variables, *(optimizer.variables if optimizer is not None else [])]
        plain = getattr(optimizer, "inner_optimizer", optimizer)
        local = plain.local_variables() if isinstance(plain, ExchangingOptimizer) else []
        own = {id(variable) for variable in local}
        broadcast_variables([variable for variable in variables if id(variable) not in own], self._root_rank)


def _is_built(model: Any) -> bool:
    # A subclass may say that it is built while its layers are not.
    return all(layer.built for layer in model._flatten_layers())  # noqa: SLF001  (no public way to walk)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces the metrics in the logs of an epoch by their means over the ranks.

    Place it before callbacks that read them (checkpoints, early stopping, TensorBoard).
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Average; collective."""
        names = sorted(logs or {})
        if not names or logs is None:
            return
        values = np.array([float(logs[name]) for name in names], np.float64)
        means = session.current().allreduce(values, ReduceOp.AVERAGE, name="MetricAverageCallback")
        logs.update(zip(names, means.tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Multiplies the learning rate within a range of epochs.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a number, or a function of the epoch, which is fractional without ``staircase``.
        start_epoch: the first epoch of the range.
        end_epoch: the end of the range, exclusive; None is for ever.
        staircase: whether the rate changes once per epoch instead of every batch.
        momentum_correction: has no effect, because the momentum of a Keras 3 optimizer is a constant of its compiled
            step; taken so that existing calls work.
        steps_per_epoch: batches per epoch; found out by Keras when None.
    """

    def __init__(  # noqa: PLR0917  the order of the arguments is Horovod's
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = False,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ConfigError("initial_lr is needed: the learning rate that the schedule multiplies.")
        if momentum_correction:
            logger.info("momentum_correction has no effect with Keras 3.")
        self._initial_lr = initial_lr
        self._multiplier = multiplier if callable(multiplier) else lambda _epoch: multiplier
        self._start, self._end = start_epoch, end_epoch
        self._staircase = staircase or not callable(multiplier)
        self._steps = steps_per_epoch
        self._epoch = 0
        self._done, self._of = 0, None  # type: int, int | None

    def begin_within(self, done: int, of: int | None) -> None:
        """Take the batches that come for the rest of epochs.

        Args:
            done: batches of an epoch that were trained before.
            of: batches of a whole epoch; None for those that Keras knows of.
        """
        self._done, self._of = done, of

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Set the rate of an epoch."""
        self._epoch = epoch
        if self._staircase:
            self._adjust(float(epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Set the rate of a batch."""
        if self._staircase:
            return
        steps = self._of or self._steps or (self.params or {}).get("steps")
        if not steps:
            raise ConfigError("Keras does not know the number of batches per epoch; give steps_per_epoch.")
        self._adjust(self._at(self._done + batch, steps))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Show the rate among the metrics."""
        if logs is not None:
            logs["lr"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _at(self, batch: int, steps: int) -> float:
        """Where a batch stands, in epochs."""
        return self._epoch + batch / steps

    def _adjust(self, epoch: float) -> None:
        if epoch >= self._start and (self._end is None or self._epoch < self._end):
            self.model.optimizer.learning_rate = self._initial_lr * self._multiplier(epoch)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr`` over the first epochs.

    Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, section 2.2.

    Args:
        initial_lr: the rate at the end of the warmup: the one of a single process times the number of ranks.
        warmup_epochs: how long it takes.
        momentum_correction: see ``LearningRateScheduleCallback``.
        steps_per_epoch: batches per epoch; found out by Keras when None.
        verbose: 1 says when the warmup is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = False,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            size = session.current().world.size
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Say when the warmup is over."""
        super().on_epoch_end(epoch, logs)
        if self._verbose and self._end is not None and epoch == int(self._end) - 1:
            logger.info("Warmup is over after epoch %d; the learning rate is %g.", epoch + 1, self._initial_lr)

    def _at(self, batch: int, steps: int) -> float:
        return self._epoch + (batch + 1) / steps  # so that the last batch of the warmup has the full rate


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keeps the model of the best epoch, on rank 0; place it after ``MetricAverageCallback``.

    Args:
        filepath: where, a ``.keras`` file; in an estimator it is set for you.
        monitor: the metric that decides.
        verbose: 1 says when a model was saved.
        mode: ``min``, ``max`` or ``auto``.
    """

    def __init__(
        self, filepath: str | None = None, monitor: str = "val_loss", verbose: int = 0, mode: str = "auto"
    ) -> None:
        super().__init__(filepath or "best.keras", monitor=monitor, verbose=verbose, save_best_only=True, mode=mode)
        self.has_filepath = filepath is not None

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        if session.current().world.rank == 0:
            super()._save_model(*args, **kwargs)


def broadcast_variables(variables: list[Any], root_rank: int = 0) -> None:
    """Overwrite Keras variables with those of ``root_rank``, in any backend.

    Args:
        variables: the same on all ranks in the same order.
        root_rank: the rank whose values count.
    """
    communicator = session.current()
    handles = []
    for index, variable in enumerate(variables):
        value = np.require(keras.ops.convert_to_numpy(variable), requirements="C")
        if value.dtype == np.uint32:  # the state of random seeds, a type that collectives do not have
            value = value.view(np.int32)
        handles.append((variable, communicator.broadcast_async(value, root_rank, name=f"keras_variable.{index}")))
    for variable, handle in handles:
        received = handle.wait()
        known = keras.ops.convert_to_numpy(variable).dtype
        variable.assign(received.view(known) if received.dtype != known else received)
