"""The contract of a Store, tested for every entry of the registry against real servers."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import threading
import time
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import fs, parquet

from sparkhvd.data import ParquetSource
from sparkhvd.data.external.locate import Access
from sparkhvd.data.external.parquet_files import open_data, open_existing
from sparkhvd.errors import StoreError
from sparkhvd.store import Store
from sparkhvd.store.registry import STORES
from sparkhvd.world import World
from tests import gcs_server
from tests.s3_server import BUCKET, SECRET


def local_location(request, tmp_path):
    return f"file://{tmp_path}/a store", {}


def dbfs_location(request, tmp_path):
    folder = Path("/dbfs", uuid.uuid4().hex)
    is_mount_missing = not folder.parent.exists()
    try:
        folder.mkdir(parents=True)
    except PermissionError:
        pytest.skip("making /dbfs, where Databricks mounts its files, needs root")
    request.addfinalizer(folder.parent.rmdir if is_mount_missing else lambda: None)
    request.addfinalizer(lambda: shutil.rmtree(folder))
    return f"dbfs:/{folder.name}/a store", {}


def hdfs_location(request, tmp_path):
    return f"{request.getfixturevalue('hdfs').url}/{uuid.uuid4().hex}/a store", {}


def viewfs_location(request, tmp_path):
    target = f"{request.getfixturevalue('hdfs').url}/{uuid.uuid4().hex}"
    return "viewfs://tests/mounted/a store", {
        "fs.viewfs.mounttable.tests.link./mounted": target,
        "fs.viewfs.mounttable.tests.linkFallback": target,
    }


def s3_location(scheme):
    return lambda request, tmp_path: (
        f"{scheme}://{BUCKET}/{uuid.uuid4().hex}/a store",
        request.getfixturevalue("s3").options,
    )


def gcs_location(request, tmp_path):
    return f"gs://{gcs_server.BUCKET}/{uuid.uuid4().hex}/a store", request.getfixturevalue("gcs")


def memory_location(request, tmp_path):
    return f"memory://{uuid.uuid4().hex}/a store", {}


# Every registered scheme needs a location here; the first test below checks this.
LOCATIONS = {
    "file": local_location,
    "dbfs": dbfs_location,
    "hdfs": hdfs_location,
    "viewfs": viewfs_location,
    **{scheme: s3_location(scheme) for scheme in ("s3", "s3a", "s3n")},
}
FSSPEC_LOCATIONS = {"gs": gcs_location, "memory": memory_location}
# One scheme for each class and kind of server; test_every_scheme_stores_and_returns_bytes covers the others.
SCHEMES = ["file", "dbfs", "hdfs", "s3", "gs", "memory"]


def test_every_registered_scheme_has_a_location():
    assert set(LOCATIONS) == set(STORES)


def create(scheme, request, tmp_path):
    url, options = (LOCATIONS | FSSPEC_LOCATIONS)[scheme](request, tmp_path)
    return Store.create(url, **({"storage_options": options} if options else {}))


@pytest.fixture(params=SCHEMES)
def store(request, tmp_path):
    created = create(request.param, request, tmp_path)
    yield created
    if hasattr(created, "_connection"):
        created._connection.close()


@pytest.mark.parametrize("scheme", [*LOCATIONS, *FSSPEC_LOCATIONS])
def test_every_scheme_stores_and_returns_bytes(scheme, request, tmp_path):
    created = create(scheme, request, tmp_path)
    created.publish("a/b", b"1")
    assert created.list("") == ["a/b"]
    assert created.at(created.url).url == created.url
    assert created.at(created.url).list("a") == ["a/b"]


def test_every_backend_implements_the_store_protocol(store):
    assert isinstance(store, Store)


def test_written_files_are_read_back_and_listed(store):
    with store.open("runs/a b/x.bin", "wb") as file:
        file.write(b"one")
        file.write(memoryview(b"two"))
    with store.open("runs/a b/x.bin", "rb") as file:
        assert file.read() == b"onetwo"
    store.publish("runs/manifest", b"m")
    assert store.list("runs") == ["runs/a b/x.bin", "runs/manifest"]
    assert store.list("runs/a b") == store.list("")[:1] == ["runs/a b/x.bin"]
    assert store.list("nothing/here") == []
    assert store.list("runs/manifest") == ["runs/manifest"], "the only path below a file is the file itself"
    assert store.exists("runs/manifest")
    assert store.exists("runs")
    assert not store.exists("runs/other")


NAMES = ["a b", "ümläut", "a%20b", "a#b?c", "a=b&c", "a+b'c", "a[1]*", "~a", "x" * 200]


def test_special_characters_in_names_are_taken_literally(store):
    for name in NAMES:
        store.publish(f"folder/{name}/{name}", b"1")
        assert store.list("") == [f"folder/{name}/{name}"]
        assert store.exists(f"folder/{name}/{name}")
        with store.open(f"folder/{name}/{name}", "rb") as file:
            assert file.read() == b"1"
        filesystem, path = store.arrow(f"folder/{name}/{name}")
        with filesystem.open_input_file(path) as file:
            assert file.read() == b"1"
        store.delete(f"folder/{name}")
        assert store.list("") == []


def test_folders_with_a_common_prefix_stay_distinct(store):
    for path in ("run/a", "run-2/b", "run.txt"):
        store.publish(path, b"")
    assert store.list("run") == ["run/a"]
    store.delete("run")
    assert store.list("") == ["run-2/b", "run.txt"]


def test_a_file_is_read_at_any_position(store):
    content = bytes(range(256)) * 20
    store.publish("x", content)
    with store.open("x", "rb") as file:
        assert file.seek(-10, os.SEEK_END) == len(content) - 10
        assert file.read() == content[-10:]
        assert file.read() == b""
        file.seek(300)
        assert file.read(5) == content[300:305]
        assert file.tell() == 305
        file.seek(len(content) + 5)
        assert file.read(5) == b""


def test_a_file_larger_than_the_buffer_is_stored(store):
    block = os.urandom(1024 * 1024)
    with store.open("large", "wb") as file:
        for _ in range(33):
            file.write(block)
    with store.open("large", "rb") as file:
        assert file.read() == block * 33


def test_a_file_appears_only_when_it_is_closed(store):
    file = store.open("x", "wb")
    file.write(b"half")
    assert not store.exists("x")
    assert store.list("") == []
    file.close()
    file.close()
    assert store.list("") == ["x"]


def test_a_failed_write_leaves_no_files(store):
    def write_half():
        with store.open("x", "wb") as file:
            file.write(b"half")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write_half()
    abandoned = store.open("y", "wb")
    abandoned.write(b"half")
    del abandoned
    assert not store.exists("x")
    assert not store.exists("y")
    assert store.list("") == []


def test_a_rewritten_file_replaces_the_old_one_when_it_is_closed(store):
    for content in (b"first", b"second"):
        with store.open("x", "wb") as file:
            file.write(content)
            if content == b"second":
                with store.open("x", "rb") as old:
                    assert old.read() == b"first"
    with store.open("x", "rb") as file:
        assert file.read() == b"second"


def test_publish_refuses_to_overwrite(store):
    store.publish("m", b"1")
    with pytest.raises(StoreError, match=r"Cannot publish .*/m: it exists already"):
        store.publish("m", b"2")
    with store.open("m", "rb") as file:
        assert file.read() == b"1"
    assert store.list("") == ["m"]


@pytest.mark.parametrize("store", ["gs"], indirect=True)
def test_a_file_is_published_even_if_the_client_repeats_its_request_after_a_lost_answer(store, monkeypatch):
    gcsfs = pytest.importorskip("gcsfs")
    send = gcsfs.core.simple_upload

    async def send_twice(*arguments, **options):
        await send(*arguments, **options)
        return await send(*arguments, **options)

    monkeypatch.setattr(gcsfs.core, "simple_upload", send_twice)
    store.publish("m", b"1")
    with pytest.raises(StoreError, match=r"Cannot publish .*/m: it exists already"):
        store.publish("m", b"2")


def test_exactly_one_of_several_publishers_wins(store):
    count = 8
    barrier = threading.Barrier(count)
    outcomes = []

    def publish(index):
        barrier.wait(30)
        try:
            store.publish("m", bytes([index]) * 1000)
            outcomes.append(index)
        except StoreError:
            pass

    threads = [threading.Thread(target=publish, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (winner,) = outcomes
    with store.open("m", "rb") as file:
        assert file.read() == bytes([winner]) * 1000
    assert store.list("") == ["m"]


def test_files_of_other_writers_are_visible_at_once(store):
    other = pickle.loads(pickle.dumps(store))
    assert store.list("") == other.list("") == []
    assert not store.exists("a/x")
    other.publish("a/x", b"1")
    assert store.exists("a/x")
    assert store.list("a") == ["a/x"]
    other.delete("a")
    assert not store.exists("a/x")
    assert store.list("a") == []


def test_delete_removes_a_file_or_folder_and_ignores_missing_paths(store):
    for path in ("a/b/c", "a/d", "e"):
        store.publish(path, b"")
    store.delete("a")
    store.delete("a")
    assert store.list("") == ["e"]
    store.delete("e")
    assert store.list("") == []


def test_a_pickled_store_equals_the_original_and_is_small(store):
    store.publish("x", b"1")
    copy = pickle.loads(pickle.dumps(store))
    assert copy == store
    assert hash(copy) == hash(store)
    assert copy.list("") == ["x"]
    assert len(pickle.dumps(store)) < 1000


def test_the_representation_of_a_store_contains_no_secret(store):
    assert SECRET not in repr(store)
    assert SECRET not in str(vars(store))


def options_of(store):
    """Return the arguments that another Store on the same server needs."""
    return {"storage_options": store.storage_options} if getattr(store, "storage_options", None) else {}


def test_runs_can_have_their_own_folder(store):
    runs_url = f"{store.url.rpartition('/')[0]}/the runs"
    options = options_of(store)
    separated = type(store)(store.url, runs_path=runs_url, **options)
    separated.publish("runs/r/x", b"1")
    separated.publish("datasets/d/y", b"2")
    assert separated.list("") == ["datasets/d/y", "runs/r/x"]
    assert separated.list("runs") == separated.list("runs/r") == ["runs/r/x"]
    assert store.list("") == ["datasets/d/y"]
    assert store.at(runs_url).list("") == ["r/x"]
    separated.delete("runs/r")
    assert separated.list("") == ["datasets/d/y"]


def test_without_a_prefix_the_store_is_the_common_folder_of_all_paths(store):
    options = options_of(store)
    paths = {"train_path": f"{store.url}/rows/train", "val_path": f"{store.url}/rows/validation"}
    created = type(store)(**paths, **options)
    assert created.url == f"{store.url}/rows"
    expected = [url.removeprefix("file://") for url in paths.values()]  # a local Store has paths, as Horovod's
    assert [created.train_path, created.val_path, created.test_path] == [*expected, None]
    store.publish("rows/train/x.parquet", b"1")
    assert created.at(created.train_path).list("") == ["x.parquet"]


def rows_of(files, split):
    source = ParquetSource(files.store, files.manifest, split, World(), 64, seed=0, shuffle=False)
    return [x for batch in source.epoch(0) for x in batch.columns["x"].tolist()]


def test_files_at_train_path_and_val_path_are_training_and_validation_data(store):
    for name, first in (("train/0", 0), ("train/1", 100), ("held out", 200)):
        with store.open(f"rows/{name}.parquet", "wb") as file:
            parquet.write_table(pa.table({"x": range(first, first + 100), "y": [0.5] * 100}), file, row_group_size=30)
    store.publish("rows/train/_SUCCESS", b"")
    options = options_of(store)
    created = type(store)(
        store.url, train_path=f"{store.url}/rows/train", val_path=f"{store.url}/rows/held out.parquet", **options
    )
    configured = []
    access = Access(created, configure=lambda store: configured.append(store) or store)
    files = open_existing(created.train_path, created.val_path, feature_cols=["x"], label_cols=["y"], access=access)
    assert rows_of(files, "train") == list(range(200))
    assert rows_of(files, "validation") == list(range(200, 300))
    assert configured == [], "the Store's own file system is used"
    url = f"{store.url}/rows/train"
    other_scheme = {"s3": "s3a"}.get(url.partition(":")[0])
    reopened = open_existing(
        url if other_scheme is None else other_scheme + url[2:], feature_cols=["x"], label_cols=["y"], access=access
    )
    assert reopened.manifest.train.rows == 200
    by_url = open_data(url, ["x"], **options)
    assert rows_of(by_url, "train") == list(range(200))
    by_path = open_data("rows/train/1.parquet", ["x"], store=store)
    assert rows_of(by_path, "train") == list(range(100, 200))
    for data in (files, reopened, by_url):
        if hasattr(data.store, "_connection"):
            data.store._connection.close()


def test_arrow_reads_parquet_written_through_the_store(store):
    table = pa.table({"x": pa.array(range(10_000), pa.int64()), "y": [[1.0, 2.0]] * 10_000})
    with store.open("folder/x.parquet", "wb") as file:
        parquet.write_table(table, file, row_group_size=1000)
    filesystem, path = store.arrow("folder/x.parquet")
    modified = filesystem.get_file_info(path).mtime_ns  # by which readers notice that a file was replaced
    assert modified is None if store.url.startswith("memory:") else abs(modified / 1e9 - time.time()) < 3600
    assert filesystem.get_file_info(f"{path}.other").type == fs.FileType.NotFound
    with filesystem.open_input_file(path) as file:
        read = parquet.ParquetFile(file)
        assert read.metadata.num_row_groups == 10
        assert read.read_row_group(7).column("x").to_pylist() == list(range(7000, 8000))
    assert parquet.read_table(path, filesystem=filesystem).equals(table)
    filesystem, folder = store.arrow("folder")
    assert parquet.read_table(folder, filesystem=filesystem).equals(table)


def test_the_spark_url_is_inside_the_store(store):
    url = store.spark_url("a/b")
    assert url is None if store.url.startswith("memory:") else url.endswith("/a/b")


@pytest.mark.parametrize("method", ["exists", "open", "publish", "delete", "spark_url", "arrow"])
def test_a_path_that_could_leave_the_store_is_refused(store, method):
    arguments = {"open": ("wb",), "publish": (b"",)}.get(method, ())
    for path in ("../x", "a/../x", "/etc/passwd", "a//b", "a/", "./x", "", "a\0b"):
        with pytest.raises(StoreError, match="is not a path inside the Store"):
            getattr(store, method)(path, *arguments)


def test_a_missing_file_is_named_with_its_url(store):
    with pytest.raises(StoreError, match=rf"Cannot open {re.escape(store.url)}/gone: No such file"):
        store.open("gone", "rb")
    filesystem, path = store.arrow("gone")
    with pytest.raises(OSError, match="No such file"):
        filesystem.open_input_file(path)


def test_an_unknown_mode_is_refused(store):
    with pytest.raises(StoreError, match="with mode 'ab'; a Store supports 'rb' and 'wb'"):
        store.open("x", "ab")
