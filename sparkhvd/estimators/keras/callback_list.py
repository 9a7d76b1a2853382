"""A list of callbacks that sees a training as one, even if it resumes within an epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras

from sparkhvd.estimators.keras.losses.metrics import Logs


class TrainingCallbackList(keras.callbacks.CallbackList):  # type: ignore[misc]  # keras has no types
    """Calls the hooks of callbacks as in one training, even if a run that resumes within an epoch calls ``fit`` twice.

    If each ``fit`` began a training, ``EarlyStopping`` would lose its state of the first epoch, and ``CSVLogger`` would
    overwrite its row.

    A callback sets up its own state when the training and its epochs begin, so a resumed run calls these hooks, too.
    The interrupted run has already called them, and the checkpoint contains their changes of the model. Therefore the
    checkpoint is restored after these hooks.

    Args:
        callbacks: the callbacks.
        model: the model.
        restore: restores the model and the states of the callbacks from the checkpoint of a resumed run.
        logs: the logs of the last epoch before this run.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: keras.Model,
        restore: Callable[[], None],
        logs: Logs = None,
    ) -> None:
        super().__init__(callbacks, add_history=True, model=model)
        self._restore = restore
        self.has_begun = False
        self._batches_before: int | None = None
        self._logs = logs

    def begin_fit(self, epochs: int, batches: int, batches_before: int | None = None) -> None:
        """Prepare for a call of ``fit``.

        Args:
            epochs: the number of epochs of the whole training.
            batches: the number of batches of every epoch in this call.
            batches_before: the number of earlier batches, if this call trains the rest of an interrupted epoch.
        """
        self._batches_before = batches_before
        self.set_params({"verbose": 0, "epochs": epochs, "steps": self._batch_of_epoch(batches)})

    def _batch_of_epoch(self, batch: int) -> int:
        """Return the index of a batch, counted from the beginning of its epoch."""
        return (self._batches_before or 0) + batch

    def on_train_begin(self, logs: Logs = None) -> None:
        """Call the hooks of the callbacks at the first call only."""
        if not self.has_begun:
            self.has_begun = True
            super().on_train_begin(logs)
            self._restore()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Call the hooks of the callbacks; restore the checkpoint if the interrupted run has already called them."""
        super().on_epoch_begin(epoch, logs)
        if self._batches_before is not None:
            self._restore()

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Call the hooks of the callbacks with the index of the batch in the whole epoch."""
        super().on_train_batch_begin(self._batch_of_epoch(batch), logs)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """See ``on_train_batch_begin``."""
        super().on_train_batch_end(self._batch_of_epoch(batch), logs)

    def on_train_end(self, logs: Logs = None) -> None:
        """Keep the logs for ``end``, because another call of ``fit`` may follow."""
        self._logs = logs

    def end(self) -> None:
        """Call the hooks of the callbacks for the end of the training; call this only if ``has_begun``."""
        super().on_train_end(self._logs)
