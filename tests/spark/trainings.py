"""The same small training with every estimator, and a callback that kills rank 1 or its executor once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch.nn import functional

from sparkhvd import Checkpoints, KerasEstimator, LightningEstimator, TorchEstimator
from sparkhvd.estimators.torch import TorchCallback

if TYPE_CHECKING:
    from sparkhvd.store import Store

ROWS = ("id / 200.0D AS a", "id % 7 / 7.0D AS b", "a * 2 - b AS y")


@dataclass(frozen=True)
class Kill:
    """Kills rank 1 or its executor once, after a step of an epoch; logs the steps of rank 0.

    Attributes:
        folder: the folder for the log and for the mark that the kill has happened.
        epoch: the epoch of the kill, from 0.
        step: the step of the kill in this epoch, from 1.
        executor: whether to kill the executor's JVM instead of the rank.
    """

    folder: str
    epoch: int
    step: int
    executor: bool = False

    def __call__(self, rank: int, epoch: int, step: int) -> None:
        marker = Path(self.folder, "killed")
        if rank == 0:
            with Path(self.folder, "steps").open("a") as steps:
                steps.write(f"{epoch}.{step} ")
        elif (epoch, step) == (self.epoch, self.step) and not marker.exists():
            marker.touch()
            executor = [parent for parent in psutil.Process().parents() if parent.name() == "java"]
            os.kill(executor[0].pid if self.executor else os.getpid(), signal.SIGKILL)


def estimator(framework: str, store: Store, kill: Kill | None = None, **overrides: Any) -> Any:
    """Return an estimator whose model has dropout, and which saves a checkpoint after every second step."""
    params = {
        "num_proc": 2,
        "store": store,
        "feature_cols": ["a", "b"],
        "label_cols": ["y"],
        "batch_size": 10,
        "epochs": 2,
        "random_seed": 3,
        "checkpoints": Checkpoints(every_steps=2),
        "verbose": 0,
    }
    return _MAKERS[framework](kill, {**params, **overrides})


def weights(framework: str, fitted: Any) -> list[float]:
    """Return all weights of a trained model as one list."""
    model = fitted.getModel()
    arrays = model.get_weights() if framework == "keras" else [each.detach().numpy() for each in model.parameters()]
    return [float(number) for array in arrays for number in array.reshape(-1)]


def _layers() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))


def _by_torch(kill: Kill | None, params: dict[str, Any]) -> TorchEstimator:
    class Callback(TorchCallback):
        def on_step_end(self, run, epoch, step, loss):
            kill(run.rank, epoch, step)

    model = _layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    callbacks = None if kill is None else [Callback()]
    return TorchEstimator(model=model, optimizer=optimizer, loss=functional.mse_loss, callbacks=callbacks, **params)


def _by_lightning(kill: Kill | None, params: dict[str, Any]) -> LightningEstimator:
    import lightning.pytorch as lightning  # noqa: PLC0415  (a slow import, which other tests do not need)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = _layers()

        def forward(self, x):
            return self.layers(x)

        def training_step(self, batch, _index):
            x, y = batch
            return functional.mse_loss(self(x)[:, 0], y.reshape(-1))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.03)

    class Callback(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            kill(trainer.global_rank, trainer.current_epoch, batch_idx + 1)

    callbacks = None if kill is None else [Callback()]
    return LightningEstimator(model=Module(), batch_format="tuple", callbacks=callbacks, **params)


def _by_keras(kill: Kill | None, params: dict[str, Any]) -> KerasEstimator:
    import keras  # noqa: PLC0415

    import sparkhvd.keras as hvd  # noqa: PLC0415

    class Callback(keras.callbacks.Callback):
        epoch = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            kill(hvd.rank(), self.epoch, batch + 1)

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, "tanh"), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    callbacks = None if kill is None else [Callback()]
    return KerasEstimator(model=model, optimizer=keras.optimizers.Adam(0.03), loss="mse", callbacks=callbacks, **params)


_MAKERS: dict[str, Callable[[Kill | None, dict[str, Any]], Any]] = {
    "torch": _by_torch,
    "lightning": _by_lightning,
    "keras": _by_keras,
}
