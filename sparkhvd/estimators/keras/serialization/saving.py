"""``checkpoint_callback``: the user's ``ModelCheckpoint``, with its files kept in the Store."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np

from sparkhvd.config import scratch_folder
from sparkhvd.errors import ParamError
from sparkhvd.estimators.keras.losses.metrics import Logs
from sparkhvd.estimators.params.fit_plan import FitPlan
from sparkhvd.estimators.params.policies import Checkpoints, Mode, metric_value
from sparkhvd.estimators.plugin import TrainHooks


class UnscaledRateCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Restores the user's unscaled learning rate before a ``ModelCheckpoint`` saves the model.

    A later fit continues with the optimizer of the saved model, and would scale its learning rate again.

    Args:
        scale: the factor by which the learning rate was multiplied.
        within_epoch: whether the ``ModelCheckpoint`` saves after batches, too.
    """

    def __init__(self, scale: float, *, within_epoch: bool) -> None:
        super().__init__()
        self._scale = scale
        self._within_epoch = within_epoch
        self._scaled: float | None = None

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Set the user's learning rate if the model may be saved now; ``close`` sets the scaled rate again."""
        if self._within_epoch:
            self.on_epoch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:  # noqa: ARG002
        """See ``on_train_batch_end``."""
        if self._scale != 1.0:
            optimizer = self.model.optimizer
            self._scaled = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
            optimizer.learning_rate = self._scaled / self._scale

    def close(self) -> None:
        """Set the scaled learning rate again."""
        if self._scaled is not None:
            self.model.optimizer.learning_rate = self._scaled
            self._scaled = None


class CheckpointFilesCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Runs after a ``ModelCheckpoint`` and passes its new files to the hooks.

    Args:
        callback: the ``ModelCheckpoint``; its folder is replaced with a temporary folder of this process. If a run
            resumes, the callback receives the best value so far.
        hooks: keep the files in the Store.
        policy: selects the best epoch.
        lr_scale: the factor by which the user's learning rate was multiplied.

    Attributes:
        callbacks: the callbacks for Keras, in the order of their calls.
    """

    def __init__(
        self, callback: keras.callbacks.ModelCheckpoint, hooks: TrainHooks, policy: Checkpoints, lr_scale: float = 1.0
    ) -> None:
        super().__init__()
        self._within_epoch = callback.save_freq != "epoch"
        self._rate = UnscaledRateCallback(lr_scale, within_epoch=self._within_epoch)
        self.callbacks = (self._rate, callback, self)
        self._folder = tempfile.TemporaryDirectory(prefix="sparkhvd-saved-", dir=scratch_folder())
        self._hooks = hooks
        self._known: dict[Path, tuple[int, int]] = {}
        callback.filepath = str(Path(self._folder.name, Path(callback.filepath).name))
        best = policy.best_epoch(hooks.history)
        if callback.save_best_only and best is not None and policy.best is not None:
            callback.best = metric_value(hooks.history[best], policy.best)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:  # noqa: ARG002
        """Keep the files that were saved within the epoch."""
        if self._within_epoch:
            self._rate.close()
            self._keep()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:  # noqa: ARG002
        """Keep the files that were saved at the end of the epoch."""
        self._rate.close()
        self._keep()

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()

    def _keep(self) -> None:
        for path in sorted(Path(self._folder.name).iterdir()):
            version = (path.stat().st_mtime_ns, path.stat().st_size)
            if self._known.get(path) != version:
                self._known[path] = version
                self._hooks.keep_file(path)


def with_callback(plan: FitPlan) -> FitPlan:
    """Return the plan with a ``checkpoints`` policy that selects the same model as ``checkpoint_callback``.

    Raises:
        ParamError: the callback is not a ``ModelCheckpoint``, or its settings are not supported.
    """
    callback, policy = plan.own["checkpoint_callback"], plan.checkpoints
    if not isinstance(callback, keras.callbacks.ModelCheckpoint):
        raise ParamError(
            f"checkpoint_callback={callback!r} must be a keras.callbacks.ModelCheckpoint, such as "
            "sparkhvd.keras.callbacks.BestModelCheckpoint(monitor='val_loss'); other callbacks go into callbacks."
        )
    if not callback.save_best_only:
        if plan.store is None or not plan.store.save_runs:
            reason = "no store is set. Pass store=" if plan.store is None else "it keeps no runs. Pass save_runs=True"
            raise ParamError(
                f"checkpoint_callback keeps its files in a Store, but {reason}, or a callback with "
                "save_best_only=True, which also selects the trained model."
            )
        return plan
    if callback.save_freq != "epoch":
        raise ParamError(
            f"checkpoint_callback has save_best_only=True and save_freq={callback.save_freq}, but the best model is "
            "known only at the end of an epoch. Leave save_freq out."
        )
    monitored = Checkpoints(
        policy.every_steps, policy.keep, callback.monitor, _mode(callback, plan.own["metrics"] or ())
    )
    if policy.best is not None and policy != monitored:
        raise ParamError(
            f"checkpoint_callback selects the best model by {monitored.best!r} ({monitored.mode}), but checkpoints "
            f"selects it by {policy.best!r} ({policy.mode}); leave one of them out."
        )
    return replace(plan, checkpoints=monitored)


def _mode(callback: keras.callbacks.ModelCheckpoint, metrics: Sequence[object] | Mapping[str, object]) -> Mode:
    """Return whether lower or higher values are better, by the rules of Keras."""
    if not hasattr(callback, "mode"):  # up to Keras 3.10, the callback decides when it is created
        return "min" if callback.monitor_op is np.less else "max"
    name = callback.monitor.removeprefix("val_")
    if callback.mode in {"min", "max"}:
        return "min" if callback.mode == "min" else "max"
    if name == "loss":
        return "min"
    direction = {"accuracy": "up", "acc": "up"}.get(name)
    for metric in metrics.values() if isinstance(metrics, Mapping) else metrics:
        is_known_name = isinstance(metric, str) and metric not in {"accuracy", "acc"}
        resolved = keras.metrics.get(metric) if is_known_name else metric
        if getattr(resolved, "name", None) == name:
            direction = getattr(resolved, "_direction", None)
    if direction not in {"up", "down"}:
        raise ParamError(
            f"checkpoint_callback monitors {callback.monitor!r}, but Keras does not know whether lower or higher is "
            "better. Create the callback with mode='min' or mode='max'."
        )
    return "max" if direction == "up" else "min"
