"""Elastic training for Keras on the TensorFlow or PyTorch backend: ``hvd.elastic.run``, ``hvd.elastic.KerasState``.

``CommitStateCallback``, ``UpdateBatchStateCallback`` and ``UpdateEpochStateCallback`` keep a state up to date during
``model.fit``, in any order among the callbacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate

import keras
import numpy as np

from sparkhvd._util.counts import counted
from sparkhvd.comm.elastic import loop
from sparkhvd.comm.elastic.loop import P, Result, S
from sparkhvd.comm.elastic.state import ObjectState, State, copied_arrays
from sparkhvd.errors import ConfigError, HorovodInternalError, HostsUpdatedInterrupt
from sparkhvd.keras.variables import broadcast_variables, is_built, refresh_constants, shared_variables

__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


def run(func: Callable[Concatenate[S, P], Result]) -> Callable[Concatenate[S, P], Result]:
    """Decorate a training function so that it survives changes of the ranks; see ``sparkhvd.torch.elastic.run``.

    Args:
        func: the training function; its first argument is the state.
    """
    if keras.config.backend() == "tensorflow":
        from sparkhvd.tensorflow import elastic  # noqa: PLC0415  (only the backend in use is imported)

        return elastic.run(func)
    return loop.run(func)


class KerasState(ObjectState):
    """The state of an elastic Keras training.

    Variables that are local to a rank (``register_local_var``) are neither broadcast nor restored.

    Args:
        model: the model, which must be built.
        optimizer: its optimizer; None uses that of the compiled model, even after ``compile`` has replaced it.
        backend: ignored; accepted so that calls written for Horovod work.
        **kwargs: plain values, such as the epoch, which become attributes.

    Raises:
        ConfigError: the model is not built.

    Examples:
        >>> state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: object = None, **kwargs: Any) -> None:
        del backend
        if not model.built or not is_built(model):
            raise ConfigError(
                "KerasState needs a model that is built, so that all ranks have the same variables. Call "
                "model.build(input_shape), or the model with a batch of rows, before you create the state."
            )
        self.model = model
        self._own_optimizer = optimizer
        self._saved_variables: list[Any] = []
        self._saved_optimizer: Any = None
        super().__init__(**kwargs)

    @property
    def optimizer(self) -> Any:
        """Return the optimizer whose variables are part of the state; None if there is none."""
        return getattr(self.model, "optimizer", None) if self._own_optimizer is None else self._own_optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self._own_optimizer = optimizer

    def save(self) -> None:
        """Keep a copy of the variables and values in memory."""
        variables = shared_variables(self.model, self.optimizer)
        values, optimizer = [_array_of(variable) for variable in variables], self.optimizer
        super().save()
        self._saved_variables, self._saved_optimizer = copied_arrays(values, self._saved_variables), optimizer

    def restore(self) -> None:
        """Return to the state of the last commit or ``sync``, including the optimizer that the model had then."""
        if self._own_optimizer is None and self.optimizer is not self._saved_optimizer:
            self.model.optimizer = self._saved_optimizer
            self.model.train_function = None  # uses the other optimizer
        variables = shared_variables(self.model, self.optimizer)
        if len(variables) != len(self._saved_variables):
            raise ConfigError(
                f"The commit has {counted(len(self._saved_variables), 'variable')}, but the model and optimizer have "
                f"{len(variables)}. Build and compile the model as it was at the commit before the state is restored."
            )
        for variable, value in zip(variables, self._saved_variables, strict=True):
            variable.assign(value.copy())  # the variable may use the memory of the array, which commits overwrite
        refresh_constants(self.model)
        super().restore()

    def _describe_parts(self) -> list[str]:
        variables = shared_variables(self.model, self.optimizer)
        # Names are not compared: Keras numbers them in the order in which a process creates layers.
        descriptions = (f"a variable of {variable.dtype}{list(variable.shape)}" for variable in variables)
        return [f"the optimizer {_kind(self.optimizer)}", *descriptions, *super()._describe_parts()]

    def _broadcast(self) -> None:
        broadcast_variables(shared_variables(self.model, self.optimizer))
        refresh_constants(self.model)
        super()._broadcast()

    def _saved_copy(self) -> dict[str, Any]:
        return {"variables": self._saved_variables, **super()._saved_copy()}

    def _set_saved_copy(self, saved: dict[str, Any]) -> None:
        self._saved_variables, self._saved_optimizer = saved["variables"], self.optimizer
        super()._set_saved_copy(saved)


def _kind(optimizer: Any) -> str:
    inner = getattr(optimizer, "inner_optimizer", None)
    return type(optimizer).__name__ if inner is None else f"{type(optimizer).__name__} of {_kind(inner)}"


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Commits a state after every ``batches_per_commit`` batches and after every epoch.

    It commits before the next batch begins, after all other callbacks have seen the end of the last batch.

    Args:
        state: the state.
        batches_per_commit: the number of batches from one commit to the next.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ConfigError(f"batches_per_commit must be at least 1, not {batches_per_commit}.")
        self._state = state
        self._batches_per_commit = batches_per_commit
        self._batches = 0  # since the last commit
        self._counted = 0  # of this epoch
        self._due = False

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Begin to count, on new and old ranks alike."""
        self._batches, self._counted, self._due = 0, 0, False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Commit the result of the last epoch."""
        self._counted = 0
        self._commit_if_due()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Count the batches since the last call, and commit their result if a commit is due.

        With ``steps_per_execution``, Keras calls this once for several batches.
        """
        self._batches += batch - self._counted
        self._counted = batch
        if self._batches >= self._batches_per_commit:
            self._due = True
        self._commit_if_due()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Plan a commit."""
        self._due = True

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002
        """Commit the result of the last epoch."""
        self._commit_if_due()

    def _commit_if_due(self) -> None:
        if self._due:
            self._batches, self._due = 0, False
            self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps ``state.batch`` at the number of batches of the current epoch that are trained; 0 between epochs.

    Keras cannot skip batches by itself. To continue within an epoch after a reset, train its rest with
    ``steps_per_epoch=steps - state.batch`` first.

    Args:
        state: a state with the value ``batch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state
        self._before = state.batch

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Continue the count from the batches before the reset."""
        self._before = self._state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Count the batch."""
        self._state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Begin a new count."""
        self._before = self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps ``state.epoch`` at the number of epochs that are trained, counted over all resets.

    Call ``model.fit`` with ``epochs=epochs - state.epoch``, or with ``epochs=epochs, initial_epoch=state.epoch``.

    Args:
        state: a state with the value ``epoch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Count the epoch."""
        self._state.epoch += 1


def _array_of(variable: Any) -> Any:
    """Return the value of a variable as an array, which shares the memory of a variable on the CPU."""
    # TensorFlow's convert_to_numpy copies; but TensorFlow makes no array of a single bfloat16 otherwise.
    if keras.config.backend() == "tensorflow" and variable.shape:
        return np.asarray(keras.ops.convert_to_tensor(variable))
    return keras.ops.convert_to_numpy(variable)
