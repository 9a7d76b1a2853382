"""What of an estimator is written to a folder, and comes back."""

from __future__ import annotations

import pytest

from sparkhvd.estimators.backend import SparkBackend
from sparkhvd.estimators.persistence import read_estimator, write_estimator
from sparkhvd.estimators.torch import TorchEstimator
from sparkhvd.store import Store


@pytest.fixture
def saved(tmp_path):
    """Writes an estimator and reads it again; and the folder of that."""
    folder = Store.create(str(tmp_path / "saved"))

    def write_and_read(estimator):
        write_estimator(estimator, folder, "estimator", "4.0.0")
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
    assert "values of the ranks' environment; give A, AWS_SECRET_ACCESS_KEY again with setBackendEnv" in caplog.text
    assert (loaded.getBatchSize(), loaded.getBackendEnv()) == (5, None)
    if "backend" in given:
        assert (loaded.getBackend().num_processes(), loaded.getBackend().env) == (2, {})


def test_a_store_comes_back_with_its_paths_and_settings(saved, tmp_path):
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
