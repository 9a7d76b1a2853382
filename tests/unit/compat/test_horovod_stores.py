"""The Stores of ``horovod.spark.common.store``: Horovod's methods on full paths."""

from __future__ import annotations

import pickle
from operator import attrgetter
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

import sparkhvd
from sparkhvd.store import layout

_PACKAGE = Path(__file__).parents[3] / "compat" / "horovod"


@pytest.fixture
def stores(monkeypatch):
    """Return the module ``horovod.spark.common.store``."""
    monkeypatch.syspath_prepend(_PACKAGE)
    from horovod.spark.common import store  # noqa: PLC0415

    return store


@pytest.mark.parametrize("class_name", ["Store.create", "FilesystemStore", "LocalStore"])
def test_a_store_in_a_folder_has_horovods_paths(stores, tmp_path, class_name):
    name, _, method = class_name.partition(".")
    create = getattr(getattr(stores, name), method) if method else getattr(stores, name)
    store = create(str(tmp_path))
    url = f"file://{tmp_path}"
    assert isinstance(store, stores.Store)
    assert isinstance(store, sparkhvd.Store)
    assert [store.get_train_data_path(), store.get_val_data_path(3), store.get_test_data_path()] == [
        f"{url}/intermediate_train_data",
        f"{url}/intermediate_val_data.3",
        f"{url}/intermediate_test_data",
    ]
    assert store.saving_runs()
    assert store.get_runs_path() == f"{url}/runs"
    assert store.get_run_path("a") == f"{url}/runs/a"
    assert store.get_logs_path("a") == f"{url}/runs/a/logs"
    assert store.get_checkpoint_path("a") == f"{url}/runs/a/checkpoints"
    assert store.prefix_path == str(tmp_path)


def test_paths_that_were_passed_replace_the_default_ones(stores, tmp_path):
    store = stores.LocalStore(str(tmp_path), "/data/train", "/data/val", "/data/test", str(tmp_path / "r"), False)
    assert store.get_train_data_path(1) == "file:///data/train.1"
    assert store.get_val_data_path() == "file:///data/val"
    assert store.get_test_data_path() == "file:///data/test"
    assert store.get_run_path("a") == f"file://{tmp_path}/r/a"
    assert [store.saving_runs(), store.get_checkpoint_path("a"), store.get_logs_path("a")] == [False, None, None]


@pytest.mark.parametrize("form", ["{}/folder/a.txt", "file://{}/folder/a.txt"])
def test_files_are_written_and_read_by_full_paths(stores, tmp_path, form):
    store = stores.Store.create(str(tmp_path / "store"))
    for folder in (tmp_path / "store", tmp_path / "other"):
        path = form.format(folder)
        assert not store.exists(path)
        store.write_text(path, "grün")
        assert store.read(path).decode() == "grün"
        assert store.exists(path)
        assert (folder / "folder" / "a.txt").read_text() == "grün"
    assert store.exists("folder/a.txt")
    assert store.read("folder/a.txt").decode() == "grün"


def test_parquet_files_are_recognized(stores, tmp_path):
    store = stores.Store.create(str(tmp_path))
    assert not store.is_parquet_dataset(store.get_train_data_path())
    (tmp_path / "intermediate_train_data").mkdir()
    parquet.write_table(pa.table({"x": [1, 2]}), tmp_path / "intermediate_train_data" / "part-0.parquet")
    assert store.is_parquet_dataset(store.get_train_data_path())
    assert store.get_parquet_dataset(store.get_train_data_path()).read().num_rows == 2


def test_a_local_folder_is_copied_to_the_run(stores, tmp_path):
    store = stores.Store.create(str(tmp_path / "store"))
    remote = pickle.loads(pickle.dumps(store)).to_remote("a", 2)
    assert remote.train_data_path.endswith("intermediate_train_data.2")
    with remote.get_local_output_dir() as folder:
        (Path(folder) / "logs").mkdir()
        (Path(folder) / "logs" / "events").write_text("1")
        (Path(folder) / "best.ckpt").write_text("2")
        remote.sync(folder)
        (Path(folder) / "best.ckpt").write_text("3")
        remote.sync(folder)
    assert not Path(folder).exists()
    assert store.read(f"{store.get_logs_path('a')}/events") == b"1"
    assert store.get_checkpoints("a") == [f"{remote.run_path}/best.ckpt"]
    assert store.read(store.get_checkpoints("a")[0]) == b"3"
    assert store.exists(layout.run_folder("a"))


def test_a_store_on_hdfs_takes_horovods_arguments(stores):
    store = stores.HDFSStore("/user/me", "namenode", 8020, None, None, "libhdfs", None, "/rows/train")
    assert store.get_train_data_path() == "hdfs://namenode:8020/rows/train"
    assert store.get_run_path("a") == "hdfs://namenode:8020/user/me/runs/a"
    assert store.get_localized_path(store.get_run_path("a")) == "/user/me/runs/a"
    assert store.get_full_path("/x") == "hdfs://namenode:8020/x"
    assert stores.HDFSStore.matches("hdfs:///x")
    assert isinstance(stores.Store.create("hdfs://namenode:8020/x"), stores.HDFSStore)


def test_paths_of_databricks_are_normalized(stores):
    for path in ("dbfs:/a/b", "/dbfs/a/b", "file:///dbfs/a/b", "file:/dbfs/a/b"):
        assert stores.DBFSLocalStore.matches_dbfs(path)
        assert stores.DBFSLocalStore.normalize_path(path) == "/dbfs/a/b"
    assert not stores.DBFSLocalStore.matches_dbfs("dbfs://a/b")
    with pytest.raises(ValueError, match=r"'/a/b' is not on Databricks' file system\. Pass /dbfs/"):
        stores.DBFSLocalStore.normalize_path("/a/b")


@pytest.mark.parametrize("class_name", ["Store.create", "FilesystemStore", "LocalStore"])
def test_the_name_of_checkpoints_is_ignored_with_a_warning(stores, tmp_path, caplog, class_name):
    store = attrgetter(class_name)(stores)(str(tmp_path), save_runs=False, checkpoint_filename="best.h5")
    assert isinstance(store, stores.LocalStore)
    assert not store.saving_runs()
    assert caplog.messages == ["LocalStore ignores checkpoint_filename='best.h5': checkpoints are named by epoch."]


def test_the_name_of_checkpoints_is_ignored_on_hdfs(stores, caplog):
    store = stores.HDFSStore("hdfs://namenode/folder", checkpoint_filename="best.h5")
    assert pickle.loads(pickle.dumps(store)).url == store.url
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "HDFSStore ignores checkpoint_filename='best.h5'"
    ]
