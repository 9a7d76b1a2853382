"""A fit after a finished run trains nothing and returns the same model, with the changes of ``on_train_end``."""

from __future__ import annotations

from functools import partial

import keras
import numpy as np
import pytest
import torch

from sparkhvd.comm import session
from sparkhvd.estimators.keras.plugin import PLUGIN as KERAS
from sparkhvd.estimators.params.policies import EarlyStopping
from sparkhvd.estimators.torch.callbacks import TorchCallback
from sparkhvd.estimators.torch.plugin import PLUGIN as TORCH
from sparkhvd.estimators.training import finished_runs
from sparkhvd.estimators.training.hooks import RunHooks
from sparkhvd.estimators.training.worker import TrainResult
from sparkhvd.store import Store, layout
from tests.unit.estimators.arrays import spec
from tests.unit.estimators.keras.networks import DATA, parameters, source


class AddAtEnd(TorchCallback):
    """Adds one to all weights after the training, when stochastic weight averaging replaces the weights."""

    def on_train_end(self, run):
        with torch.no_grad():
            for weight in run.model.parameters():
                weight.add_(1.0)


class StopAfterSecondEpoch(AddAtEnd):
    """Ends the training after the second epoch and adds one to all weights."""

    def on_epoch_end(self, run, epoch, logs):
        run.stop = epoch == 1


class AddAtEndInKeras(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        self.model.set_weights([weight + 1.0 for weight in self.model.get_weights()])


def torch_trainer(callback, how):
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 3)
    params = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "label_cols": ("y",), "schema": DATA}
    params = {**params, "loss": torch.nn.functional.cross_entropy, "callbacks": [callback]}
    return TORCH.trainer(TORCH.pack(params), how, session.current().world)


def keras_trainer(callback, how):
    return KERAS.trainer(KERAS.pack(parameters(callbacks=[callback])), how, session.current().world)


def weights(trainer):
    model = trainer._model
    arrays = model.get_weights() if hasattr(model, "get_weights") else [w.detach().numpy() for w in model.parameters()]
    return np.concatenate([array.flatten() for array in arrays])


def fit(make, folder, alone, epochs, early_stopping=None):
    how = spec(DATA, epochs=epochs, early_stopping=early_stopping)
    trainer, hooks = make(how), RunHooks(Store.create(str(folder)), "run", how, alone)
    if hooks.resume.checkpoint is not None:
        trainer.restore(hooks.resume.checkpoint.state)
    trainer.fit(source([(4,)] * 5, 0), None, hooks)
    return weights(trainer), len(hooks.history)


def best_of_falling_loss():
    # The loss falls, so mode="max" ends the training after the second epoch and the first epoch is the best.
    return keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)


@pytest.mark.parametrize(
    "make",
    [lambda how: keras_trainer(best_of_falling_loss(), how), partial(torch_trainer, StopAfterSecondEpoch())],
    ids=["keras", "torch"],
)
def test_a_run_that_a_callback_ended_does_not_train_again(alone, tmp_path, make):
    fitted = []
    for epochs in (5, 9):
        trained, completed = fit(make, tmp_path, alone, epochs)
        assert completed == 2
        fitted.append(trained)
    assert np.array_equal(*fitted)


ADD_AT_END = pytest.mark.parametrize(
    "make",
    [lambda how: keras_trainer(AddAtEndInKeras(), how), partial(torch_trainer, AddAtEnd())],
    ids=["keras", "torch"],
)


@ADD_AT_END
def test_a_finished_run_keeps_the_changes_of_on_train_end(alone, tmp_path, make):
    trained, _ = fit(make, tmp_path, alone, 2)
    for _ in range(2):
        again, epochs = fit(make, tmp_path, alone, 2)
        assert np.array_equal(again, trained)
        assert epochs == 2


@ADD_AT_END
def test_a_finished_run_resumes_for_more_epochs_without_the_changes_of_on_train_end(alone, tmp_path, make):
    fit(make, tmp_path / "extended", alone, 2)
    extended, _ = fit(make, tmp_path / "extended", alone, 3)
    straight, _ = fit(make, tmp_path / "straight", alone, 3)
    assert np.array_equal(extended, straight)
    again, epochs = fit(make, tmp_path / "extended", alone, 3)
    assert np.array_equal(again, straight)
    assert epochs == 3


def test_a_run_that_stopped_early_keeps_the_changes_of_on_train_end(alone, tmp_path):
    rule = EarlyStopping(monitor="loss", patience=1, mode="max")
    trained, epochs = fit(partial(torch_trainer, AddAtEnd()), tmp_path, alone, 6, rule)
    assert epochs < 6
    again, _ = fit(partial(torch_trainer, AddAtEnd()), tmp_path, alone, 6, rule)
    assert np.array_equal(again, trained)


def test_a_run_that_was_interrupted_after_its_last_epoch_gets_the_changes_of_on_train_end(alone, tmp_path):
    make = partial(torch_trainer, AddAtEnd())
    fit(make, tmp_path, alone, 2)
    store = Store.create(str(tmp_path))
    with store.open(layout.final_path("run", 1), "rb") as file:
        stale = file.read()
    trained, _ = fit(make, tmp_path, alone, 3)
    store.delete(layout.final_path("run", 2))
    resumed, _ = fit(make, tmp_path, alone, 3)
    assert np.array_equal(resumed, trained)
    store.publish(layout.final_path("run", 1), stale)  # as if a fit had been killed before it deleted this file
    again, _ = fit(make, tmp_path, alone, 3)
    assert np.array_equal(again, trained), "the final state of an earlier epoch is ignored"


def test_a_csv_logger_of_keras_keeps_the_rows_of_earlier_epochs_when_a_run_resumes(alone, tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("rows of another training")
    for epochs in (1, 2, 2):
        fit(partial(keras_trainer, keras.callbacks.CSVLogger(file)), tmp_path, alone, epochs)
        header, *rows = file.read_text().splitlines()
        assert header.startswith("epoch,")
        assert [row.split(",")[0] for row in rows] == list("01")[:epochs]


def test_a_result_that_cannot_be_saved_does_not_fail_the_fit(tmp_path, caplog):
    store = Store.create(str(tmp_path))
    store.publish(layout.run_folder("run"), b"a file in place of the folder")
    finished_runs.save(store, "run", 1, TrainResult((), (), None, DATA, []))
    assert "The result of run run cannot be saved, so a later fit needs ranks again: Cannot " in caplog.text
