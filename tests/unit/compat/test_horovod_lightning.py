"""Hooks and steps of Lightning 1 in modules and callbacks for ``horovod.spark.lightning``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import LearningRateMonitor
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins.environments import LightningEnvironment

from sparkhvd.errors import ParamError
from sparkhvd.estimators.lightning.package import LightningPackage

_PACKAGE = Path(__file__).parents[3] / "compat" / "horovod"


@pytest.fixture
def lightning_1(monkeypatch):
    monkeypatch.syspath_prepend(_PACKAGE)
    from horovod.spark.lightning import lightning_1  # noqa: PLC0415

    yield lightning_1
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.calls = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, _number):
        return self.layer(batch).mean()

    def validation_step(self, batch, _number):
        return self.layer(batch).mean()

    def on_epoch_start(self):
        self.calls.append("module.on_epoch_start")

    def training_epoch_end(self, outputs):
        self.log("steps", float(len(outputs)))
        self.calls.append("module.training_epoch_end")

    def on_train_epoch_end(self):
        self.calls.append("module.on_train_epoch_end")

    def on_epoch_end(self):
        self.log("logged", 1.0)
        self.calls.append("module.on_epoch_end")


class Recorder(Callback):
    def __init__(self, calls):
        self.calls = calls

    def on_epoch_end(self, trainer, _module):
        assert trainer.current_epoch == 0
        self.calls.append("on_epoch_end")


def record_calls_of(hook):
    setattr(Recorder, hook, lambda recorder, *_: recorder.calls.append(hook))


for name in (
    "on_init_end",
    "on_pretrain_routine_start",
    "on_epoch_start",
    "on_train_epoch_start",
    "on_batch_start",
    "on_train_batch_end",
    "on_batch_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_train_epoch_end",
):
    record_calls_of(name)


def package(model, *callbacks):
    return LightningPackage(model, (), None, None, None, "dict", callbacks, None, {}, None)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_hooks_of_lightning_1_are_called_in_their_order(lightning_1, tmp_path):
    model = Model()
    callbacks = lightning_1.with_lightning_1_hooks(package(model, Recorder(model.calls))).callbacks
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        plugins=[LightningEnvironment()],  # else Lightning initializes MPI
        callbacks=list(callbacks),
        logger=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, torch.ones(1, 1, 1), torch.ones(1, 1, 1))
    assert model.calls == [
        "on_init_end",
        "on_pretrain_routine_start",
        "on_epoch_start",
        "module.on_epoch_start",
        "on_train_epoch_start",
        "on_batch_start",
        "on_train_batch_end",
        "on_batch_end",
        "on_epoch_start",
        "module.on_epoch_start",
        "on_validation_epoch_start",
        "on_validation_epoch_end",
        "on_epoch_end",
        "module.on_epoch_end",
        "module.training_epoch_end",
        "on_train_epoch_end",
        "module.on_train_epoch_end",
        "on_epoch_end",
        "module.on_epoch_end",
    ]
    assert trainer.callback_metrics["steps"] == trainer.callback_metrics["logged"] == 1.0
    assert callable(model.training_epoch_end), "the method is visible again"


def test_callbacks_without_hooks_of_lightning_1_are_unchanged(lightning_1):
    own = package(torch.nn.Linear(1, 1), Callback())
    assert lightning_1.with_lightning_1_hooks(own) is own


def test_a_callback_that_needs_a_logger_gets_one(lightning_1):
    from horovod.spark.lightning import plugin  # noqa: PLC0415

    own = CSVLogger("own")
    packages = [package(Model(), LearningRateMonitor()), package(Model(), Recorder([]))]
    packages.append(replace(packages[0], logger=own))
    loggers = [plugin._with_logger(given).logger for given in packages]
    assert isinstance(loggers[0], CSVLogger)
    assert loggers[1:] == [None, own]


def test_steps_that_lightning_2_does_not_call_are_refused(lightning_1):
    class Ended(Model):
        def validation_step_end(self, outputs):
            return outputs

    class Indexed(Model):
        def optimizer_step(self, _epoch, _number, optimizer, optimizer_idx=0, optimizer_closure=None):
            del optimizer_idx
            optimizer.step(optimizer_closure)

    with pytest.raises(ParamError, match=r"Ended defines validation_step_end, .* Move its code to the end of val"):
        lightning_1.refuse_removed_steps(Ended())
    with pytest.raises(ParamError, match=r"optimizer_step of Indexed takes optimizer_idx, which Lightning 2 does not"):
        lightning_1.refuse_removed_steps(Indexed())
    lightning_1.refuse_removed_steps(Model())


def test_the_profiler_is_an_argument_of_the_trainer(lightning_1):
    from horovod.spark.lightning import TorchEstimator  # noqa: PLC0415

    estimator = TorchEstimator(profiler="simple", trainer_args={"gradient_clip_val": 1.0})
    assert estimator.getTrainerArgs() == {"profiler": "simple", "gradient_clip_val": 1.0}
    assert estimator.setProfiler("advanced").getTrainerArgs() == {"profiler": "advanced", "gradient_clip_val": 1.0}
