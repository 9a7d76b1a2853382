"""``checkpoint_callback``: the user's ``ModelCheckpoint``, whose files go to the Store."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from sparkhvd.config import scratch_folder
from sparkhvd.errors import ParamError
from sparkhvd.estimators.params.policies import Checkpoints, Mode, metric_value
from sparkhvd.estimators.plugin import TrainHooks


class UserRate(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Comes before a ``ModelCheckpoint``: what that saves has the learning rate that the user gave, not the scaled one.

    A model is trained further with the optimizer that it was saved with, and would be scaled again.

    Args:
        scale: what the rate was multiplied by.
        within_epoch: whether that saves after batches, too.
    """

    def __init__(self, scale: float, *, within_epoch: bool) -> None:
        super().__init__()
        self._scale = scale
        self._within_epoch = within_epoch
        self._scaled: float | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Set the user's rate where the model may be saved; ``close`` sets the scaled one again."""
        if self._within_epoch:
            self.on_epoch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """See ``on_train_batch_end``."""
        if self._scale != 1.0:
            optimizer = self.model.optimizer
            self._scaled = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
            optimizer.learning_rate = self._scaled / self._scale

    def close(self) -> None:
        """Set the rate that is trained with."""
        if self._scaled is not None:
            self.model.optimizer.learning_rate = self._scaled
            self._scaled = None


class KeptFiles(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Comes after a ``ModelCheckpoint`` and brings what that has written to the hooks.

    Args:
        callback: writes into a folder of this process's; what it knows of the best epoch so far is set where a run goes
            on.
        hooks: keep the files.
        policy: by which the best epoch is chosen.
        lr_scale: what the user's learning rate was multiplied by.

    Attributes:
        callbacks: what Keras is to call, in this order.
    """

    def __init__(self, callback: Any, hooks: TrainHooks, policy: Checkpoints, lr_scale: float = 1.0) -> None:
        super().__init__()
        self._within_epoch = callback.save_freq != "epoch"
        self._rate = UserRate(lr_scale, within_epoch=self._within_epoch)
        self.callbacks = (self._rate, callback, self)
        self._folder = tempfile.TemporaryDirectory(prefix="sparkhvd-saved-", dir=scratch_folder())
        self._hooks = hooks
        self._known: dict[Path, tuple[int, int]] = {}
        callback.filepath = str(Path(self._folder.name, Path(callback.filepath).name))
        best = policy.best_epoch(hooks.history)
        if callback.save_best_only and best is not None and policy.best is not None:
            callback.best = metric_value(hooks.history[best], policy.best)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Keep what was saved within the epoch."""
        if self._within_epoch:
            self._rate.close()
            self._keep()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Keep what was saved at the end of the epoch."""
        self._rate.close()
        self._keep()

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()

    def _keep(self) -> None:
        for path in sorted(Path(self._folder.name).iterdir()):
            found = (path.stat().st_mtime_ns, path.stat().st_size)
            if self._known.get(path) != found:
                self._known[path] = found
                self._hooks.keep_file(path)


def with_callback(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, with ``checkpoints`` such that the trained model is the one that ``checkpoint_callback`` wants.

    Raises:
        ParamError: the callback is of another kind, or cannot do what it says.
    """
    callback, policy = params["checkpoint_callback"], params["checkpoints"]
    if not isinstance(callback, keras.callbacks.ModelCheckpoint):
        raise ParamError(
            f"checkpoint_callback={callback!r} must be a keras.callbacks.ModelCheckpoint, such as "
            "sparkhvd.keras.callbacks.BestModelCheckpoint(monitor='val_loss'); other callbacks go into callbacks."
        )
    if not callback.save_best_only:
        if params["store"] is None or not params["store"].save_runs:
            none = "none is given. Pass store=" if params["store"] is None else "it keeps no runs. Pass save_runs=True"
            raise ParamError(
                f"checkpoint_callback keeps its files in a Store, but {none}, or a callback with "
                "save_best_only=True, which decides about the trained model as well."
            )
        return dict(params)
    if callback.save_freq != "epoch":
        raise ParamError(
            f"checkpoint_callback has save_best_only=True and save_freq={callback.save_freq}; which model is the best "
            "is known at the end of an epoch. Leave save_freq out."
        )
    watched = Checkpoints(policy.every_steps, policy.keep, callback.monitor, _mode(callback, params))
    if policy.best is not None and policy != watched:
        raise ParamError(
            f"checkpoint_callback takes the best {watched.best!r} ({watched.mode}) and checkpoints the best "
            f"{policy.best!r} ({policy.mode}); leave one of them out."
        )
    return {**params, "checkpoints": watched}


def _mode(callback: Any, params: Mapping[str, Any]) -> Mode:
    """Whether less or more is better, as Keras decides it."""
    name = callback.monitor.removeprefix("val_")
    if callback.mode in {"min", "max"}:
        return "min" if callback.mode == "min" else "max"
    if name == "loss":
        return "min"
    direction = {"accuracy": "up", "acc": "up"}.get(name)
    metrics = params["metrics"] or ()
    for metric in metrics.values() if isinstance(metrics, Mapping) else metrics:
        found = keras.metrics.get(metric) if isinstance(metric, str) and metric not in {"accuracy", "acc"} else metric
        if getattr(found, "name", None) == name:
            direction = getattr(found, "_direction", None)
    if direction not in {"up", "down"}:
        raise ParamError(
            f"checkpoint_callback watches {callback.monitor!r}; whether less or more of it is better cannot be told. "
            "Give the callback mode='min' or mode='max'."
        )
    return "max" if direction == "up" else "min"
