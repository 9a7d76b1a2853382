"""Saving an estimator to a folder and loading it again."""

from __future__ import annotations

import json
from functools import partial

import keras
import numpy as np
import pytest
import torch

from sparkhvd.errors import ParamError
from sparkhvd.estimators.keras import KerasEstimator
from sparkhvd.estimators.models.persistence import read_estimator, write_estimator
from sparkhvd.estimators.models.saved_folder import write_new
from sparkhvd.estimators.params.backend import SparkBackend
from sparkhvd.estimators.torch import TorchEstimator
from sparkhvd.store import Store


@pytest.fixture
def saved(tmp_path):
    """Return a function that saves and loads an estimator, and the folder that it uses."""
    folder = Store.create(str(tmp_path / "saved"))

    def write_and_read(estimator):
        write_new(folder, "estimator", partial(write_estimator, estimator, spark_version="4.0.0"))
        return read_estimator(type(estimator), folder, "estimator")

    return write_and_read, tmp_path / "saved" / "estimator"


@pytest.mark.parametrize(
    "given",
    [
        {"backend_env": {"AWS_SECRET_ACCESS_KEY": "hush-hush", "A": None}},
        {"backend": SparkBackend(2, env={"AWS_SECRET_ACCESS_KEY": "hush-hush", "A": None}, launcher="local")},
    ],
)
def test_the_values_of_the_ranks_environment_are_not_saved(saved, given, caplog):
    write_and_read, folder = saved
    loaded = write_and_read(TorchEstimator(batch_size=5, **given))
    files = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    assert files
    assert not any(b"hush-hush" in content for content in files)
    assert "values of the ranks' environment; set A, AWS_SECRET_ACCESS_KEY again with setBackendEnv" in caplog.text
    assert (loaded.getBatchSize(), loaded.getBackendEnv()) == (5, None)
    if "backend" in given:
        assert (loaded.getBackend().num_processes(), loaded.getBackend().env) == (2, {})


def test_a_loaded_store_has_its_paths_and_settings(saved, tmp_path):
    paths = {name: str(tmp_path / "data" / name) for name in ("train_path", "val_path", "test_path", "runs_path")}
    store = Store.create(str(tmp_path / "own"), save_runs=False, **paths)
    loaded = saved[0](TorchEstimator(store=store)).getStore()
    assert loaded == store
    assert (loaded.save_runs, loaded.val_path) == (False, paths["val_path"])


def test_the_options_of_a_store_are_not_saved(saved):
    write_and_read, folder = saved
    store = Store.create("memory://bucket/own", storage_options={"secret": "hush-hush"}, val_path="memory://bucket/val")
    loaded = write_and_read(TorchEstimator(store=store)).getStore()
    assert not any(b"hush-hush" in file.read_bytes() for file in folder.rglob("*") if file.is_file())
    assert (loaded.val_path, len(loaded.storage_options)) == (store.val_path, 0)


class Twice(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        self.first, self.second = make(torch.nn.Linear(2, 2)), make(torch.nn.Linear(2, 1))

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(
    "make", [lambda: torch.jit.script(torch.nn.Linear(2, 1)), lambda: Twice(torch.jit.script)], ids=["whole", "parts"]
)
def test_a_model_of_torchscript_is_loaded_with_its_optimizer(saved, make):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    loaded = saved[0](TorchEstimator(model=model, optimizer=optimizer))
    x = torch.ones(3, 2)
    assert torch.equal(loaded.getModel()(x), model(x))
    before = loaded.getModel()(x).detach()
    loaded.getModel()(x).sum().backward()
    loaded.getOptimizer().step()
    assert not torch.equal(loaded.getModel()(x), before), "the optimizer has the parameters of the loaded model"


@pytest.mark.parametrize("given", [True, False])
def test_a_keras_model_is_loaded_with_the_class_of_its_layer(saved, given):
    class Scaled(keras.layers.Layer):
        def call(self, x):
            return 3 * x

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), Scaled()])
    custom = {"Scaled": Scaled} if given else None
    loaded = saved[0](KerasEstimator(model=model, custom_objects=custom, loss="mse", batch_size=7))
    x = np.ones((3, 2), np.float32)
    np.testing.assert_array_equal(loaded.getModel().predict_on_batch(x), model.predict_on_batch(x))
    assert (loaded.getLoss(), loaded.getBatchSize()) == ("mse", 7)


def test_a_folder_of_a_later_version_is_refused(saved):
    write_and_read, folder = saved
    write_and_read(TorchEstimator(batch_size=5))
    metadata = folder / "metadata" / "part-00000"
    content = json.loads(metadata.read_text())
    content["sparkhvd"]["format"] += 2
    metadata.write_text(json.dumps(content))
    with pytest.raises(ParamError, match=r"was saved in format 3; this version reads up to 2\. Install a newer"):
        read_estimator(TorchEstimator, Store.create(str(folder.parent)), folder.name)
