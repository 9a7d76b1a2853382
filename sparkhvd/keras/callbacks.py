"""Callbacks for ``model.fit`` on every rank, with the names and meanings of Horovod."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.interface import allgather_object
from sparkhvd.errors import ConfigError, MismatchError
from sparkhvd.keras.optimizer import ExchangingOptimizer
from sparkhvd.keras.variables import broadcast_variables, is_built, refresh_constants, shared_variables

logger = logging.getLogger(__name__)


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Starts all ranks from the weights and the optimizer state of ``root_rank``, except for local variables.

    Every rank keeps the states of its random generators, so that dropout and noise differ between ranks.

    The variables are broadcast before the first step. A model that is built by its first batch (a ``Sequential``
    without an ``Input``, a subclass that has not been called) has no variables by then: its ranks continue from the
    state of ``root_rank`` after the first step.

    The callback logs a warning if every rank would train a model of its own. This happens if the model has Keras' own
    training step and an optimizer that does not exchange gradients, as copied and loaded models have.

    Args:
        root_rank: the rank whose variables are sent.
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._done = False

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Warn if the ranks train apart."""
        world = session.current().world
        if world.rank == 0 and world.size > 1 and _trains_apart(self.model):
            logger.warning(
                "The optimizer of this model does not exchange gradients, so every rank trains a model of its own. "
                "Wrap it with hvd.DistributedOptimizer and compile the model again. Copies of a model "
                "(keras.models.clone_model, copy.deepcopy, pickle, keras.saving.load_model) have a plain optimizer."
            )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Broadcast before the first step, if the model has all its variables."""
        if not self._done and is_built(self.model):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Broadcast after the first step, if the model was built in it."""
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        self._done = True
        broadcast_variables(self._variables(), self._root_rank)
        refresh_constants(self.model)

    def _variables(self) -> list[Any]:
        """Return the variables to broadcast, in the same order on all ranks."""
        return shared_variables(self.model, self.model.optimizer)


def _trains_apart(model: Any) -> bool:
    """Return whether nothing exchanges the gradients of ``model.fit``."""
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)  # of a LossScaleOptimizer
    return type(model).train_step is keras.Model.train_step and not isinstance(inner, ExchangingOptimizer)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces the metrics in the logs of an epoch, numbers or arrays, with their means over the ranks.

    Place it before callbacks that read the logs (checkpoints, early stopping, TensorBoard).
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Average the logs over the ranks; collective.

        Raises:
            MismatchError: the ranks have metrics of different names.
        """
        names = sorted(logs or {})
        if not names or logs is None:
            return
        of_ranks = allgather_object(names, name="MetricAverageCallback.names")
        if any(other != of_ranks[0] for other in of_ranks):
            listed = ", ".join(f"rank {rank} has {of_rank}" for rank, of_rank in enumerate(of_ranks))
            raise MismatchError(
                f"The ranks have different metrics: {listed}. Compile the model with the same metrics on all ranks, "
                "and validate on all of them or on none."
            )
        values = [np.asarray(keras.ops.convert_to_numpy(logs[name]), np.float64) for name in names]
        together = np.concatenate([value.ravel() for value in values])
        means = session.current().allreduce(together, ReduceOp.AVERAGE, name="MetricAverageCallback")
        parts = np.split(means, np.cumsum([value.size for value in values])[:-1])
        for name, value, part in zip(names, values, parts, strict=True):
            logs[name] = part.reshape(value.shape) if value.ndim else part.item()


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Multiplies the learning rate within a range of epochs.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a number, the same in all epochs; or a function of the epoch, which is fractional without
            ``staircase``.
        start_epoch: the first epoch of the range.
        end_epoch: the end of the range, exclusive; None for no end.
        staircase: whether the rate changes once per epoch instead of every batch.
        momentum_correction: has no effect, because the momentum of a Keras 3 optimizer is a constant of its compiled
            step; accepted so that existing calls work.
        steps_per_epoch: batches per epoch; None uses the number that Keras reports.
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
            raise ConfigError("initial_lr must be set: it is the learning rate that the schedule multiplies.")
        if momentum_correction:
            logger.info("momentum_correction has no effect with Keras 3.")
        self._initial_lr = initial_lr
        self._multiplier = multiplier if callable(multiplier) else lambda _epoch: multiplier
        self._start, self._end = start_epoch, end_epoch
        self._staircase = staircase or not callable(multiplier)
        self._steps = steps_per_epoch
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Set the learning rate of the epoch."""
        self._epoch = epoch
        if self._staircase:
            self._adjust(float(epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Set the learning rate of the batch."""
        if self._staircase:
            return
        steps = self._steps or (self.params or {}).get("steps")
        if not steps:
            raise ConfigError("Keras does not know the number of batches per epoch; pass steps_per_epoch.")
        self._adjust(self._epoch_at(batch, steps))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Add the learning rate to the logs."""
        if logs is not None:
            logs["lr"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _epoch_at(self, batch: int, steps: int) -> float:
        """Return the position of a batch in the training, in epochs."""
        return self._epoch + batch / steps

    def _adjust(self, epoch: float) -> None:
        if epoch >= self._start and (self._end is None or self._epoch < self._end):
            self.model.optimizer.learning_rate = self._initial_lr * self._multiplier(epoch)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr`` over the first epochs.

    Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, section 2.2.

    Args:
        initial_lr: the rate at the end of the warmup: the rate of a single process times the number of ranks.
        warmup_epochs: length of the warmup in epochs.
        momentum_correction: see ``LearningRateScheduleCallback``.
        steps_per_epoch: batches per epoch; None uses the number that Keras reports.
        verbose: 1 logs the end of the warmup.
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
            done = min(epoch / warmup_epochs, 1.0)
            return 1.0 / size * (done * (size - 1) + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self._verbose = verbose
        self._is_below = False  # whether the last batch had less than the full rate

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the full rate after the warmup: with ``steps_per_execution``, no batch may have had it."""
        super().on_epoch_begin(epoch, logs)
        if self._is_below and self._end is not None and epoch >= self._end:
            self.model.optimizer.learning_rate = self._initial_lr
            self._is_below = False

    def _adjust(self, epoch: float) -> None:
        super()._adjust(epoch)
        self._is_below = self._end is not None and epoch < self._end

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Report the end of the warmup."""
        super().on_epoch_end(epoch, logs)
        if self._verbose and self._end is not None and epoch == int(self._end) - 1:
            self._report(f"The warmup ended after epoch {epoch + 1}; the learning rate is {self._initial_lr:g}.")

    def _report(self, line: str) -> None:
        logger.info(line)

    def _epoch_at(self, batch: int, steps: int) -> float:
        return self._epoch + (batch + 1) / steps  # so that the last batch of the warmup has the full rate


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keeps the model of the best epoch, on rank 0; place it after ``MetricAverageCallback``.

    Args:
        filepath: the ``.keras`` file to write; an estimator sets it for you.
        monitor: the metric that selects the best epoch.
        verbose: 1 reports when a model is saved.
        mode: ``min``, ``max`` or ``auto``.
        save_freq: ``epoch``, or the number of batches after which the callback looks for a better model.
    """

    def __init__(
        self,
        filepath: str | None = None,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(
            filepath or "best.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            mode=mode,
            save_freq=save_freq,
        )
        self.has_filepath = filepath is not None

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        if session.current().world.rank == 0:
            super()._save_model(*args, **kwargs)
