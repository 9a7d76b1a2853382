"""Runs that have ended: a later fit trains nothing and returns the same model, with the callbacks' last changes."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import torch

from sparkhvd.comm import session
from sparkhvd.estimators.keras.plugin import PLUGIN as KERAS
from sparkhvd.estimators.params.policies import EarlyStopping
from sparkhvd.estimators.torch.callbacks import TorchCallback
from sparkhvd.estimators.torch.plugin import PLUGIN as TORCH
from sparkhvd.estimators.training.hooks import RunHooks
from sparkhvd.store import Store
from tests.unit.estimators.arrays import spec
from tests.unit.estimators.keras.networks import DATA, parameters, source


class StopSecond(TorchCallback):
    """Ends the training after the second epoch, and then adds one to all weights."""

    def on_epoch_end(self, run, epoch, logs):
        run.stop = epoch == 1

    def on_train_end(self, run):
        with torch.no_grad():
            for weight in run.model.parameters():
                weight.add_(1.0)


def torch_trainer(how):
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 3)
    params = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "label_cols": ("y",), "schema": DATA}
    params = {**params, "loss": torch.nn.functional.cross_entropy, "callbacks": [StopSecond()]}
    return TORCH.trainer(TORCH.pack(params), how, session.current().world)


def keras_trainer(how):
    # The loss falls, so mode="max" ends the training after the second epoch and the first epoch is the best.
    callback = keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)
    return KERAS.trainer(KERAS.pack(parameters(callbacks=[callback])), how, session.current().world)


def weights(trainer):
    model = trainer._model
    arrays = model.get_weights() if hasattr(model, "get_weights") else [w.detach().numpy() for w in model.parameters()]
    return np.concatenate([array.flatten() for array in arrays])


@pytest.mark.parametrize("made", [keras_trainer, torch_trainer])
def test_a_run_that_a_callback_ended_is_not_trained_again(alone, tmp_path, made):
    fitted = []
    for epochs in (5, 9):
        how = spec(DATA, epochs=epochs)
        trainer, hooks = made(how), RunHooks(Store.create(str(tmp_path)), "run", how, alone)
        if hooks.resume.checkpoint is not None:
            trainer.restore(hooks.resume.checkpoint.state)
        trainer.fit(source([(4,)] * 5, 0), None, hooks)
        assert len(hooks.history) == 2
        fitted.append(weights(trainer))
    assert np.array_equal(*fitted)


class AddAtEnd(TorchCallback):
    """Adds one to all weights after the training, as stochastic weight averaging replaces them."""

    def on_train_end(self, run):
        with torch.no_grad():
            for weight in run.model.parameters():
                weight.add_(1.0)


class AddAtEndInKeras(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        self.model.set_weights([weight + 1.0 for weight in self.model.get_weights()])


def fit(make, folder, alone, epochs, early_stopping=None):
    how = spec(DATA, epochs=epochs, early_stopping=early_stopping)
    trainer, hooks = make(how), RunHooks(Store.create(str(folder)), "run", how, alone)
    if hooks.resume.checkpoint is not None:
        trainer.restore(hooks.resume.checkpoint.state)
    trainer.fit(source([(4,)] * 5, 0), None, hooks)
    return weights(trainer), len(hooks.history)


def torch_trainer_with_end(how):
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 3)
    params = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "label_cols": ("y",), "schema": DATA}
    params = {**params, "loss": torch.nn.functional.cross_entropy, "callbacks": [AddAtEnd()]}
    return TORCH.trainer(TORCH.pack(params), how, session.current().world)


def keras_trainer_with_end(how):
    return KERAS.trainer(KERAS.pack(parameters(callbacks=[AddAtEndInKeras()])), how, session.current().world)


ENDS = [keras_trainer_with_end, torch_trainer_with_end]


@pytest.mark.parametrize("make", ENDS)
def test_a_finished_run_keeps_what_a_callback_changed_at_its_end(alone, tmp_path, make):
    trained, _ = fit(make, tmp_path, alone, 2)
    for _ in range(2):
        again, epochs = fit(make, tmp_path, alone, 2)
        assert np.array_equal(again, trained)
        assert epochs == 2


@pytest.mark.parametrize("make", ENDS)
def test_a_finished_run_with_more_epochs_resumes_from_before_that_change(alone, tmp_path, make):
    fit(make, tmp_path / "extended", alone, 2)
    extended, _ = fit(make, tmp_path / "extended", alone, 3)
    straight, _ = fit(make, tmp_path / "straight", alone, 3)
    assert np.array_equal(extended, straight)
    again, epochs = fit(make, tmp_path / "extended", alone, 3)
    assert np.array_equal(again, straight)
    assert epochs == 3


def test_a_run_that_stopped_early_keeps_what_a_callback_changed_at_its_end(alone, tmp_path):
    rule = EarlyStopping(monitor="loss", patience=1, mode="max")
    trained, epochs = fit(torch_trainer_with_end, tmp_path, alone, 6, rule)
    assert epochs < 6
    again, _ = fit(torch_trainer_with_end, tmp_path, alone, 6, rule)
    assert np.array_equal(again, trained)
