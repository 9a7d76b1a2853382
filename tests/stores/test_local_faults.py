"""Stores in folders that are full, removed or read-only, or that have leftovers of a killed writer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from sparkhvd.data.reuse import leases
from sparkhvd.errors import StoreError
from sparkhvd.estimators.training import job_files
from sparkhvd.store import LocalStore, Store, layout
from sparkhvd.store.access import remote_file


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    completed = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if completed.returncode:
        pytest.skip(f"mounting a small disk needs root and the right to mount: {completed.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_an_error_and_leaves_no_partial_file(small_disk):
    store = LocalStore(str(small_disk / "store"))
    store.publish("before", b"1")
    with pytest.raises(StoreError, match=r"Cannot publish file://.*/a: No space left on device"):
        store.publish("a", bytes(2_000_000))

    def write_too_much():
        with store.open("b", "wb") as file:
            file.write(bytes(4000))
            file.write(bytes(2_000_000))

    with pytest.raises(StoreError, match=r"Cannot write file://.*/b: No space left on device"):
        write_too_much()
    assert store.list("") == ["before"]
    assert [path.name for path in small_disk.rglob("*") if path.is_file()] == ["before"]
    store.publish("after", b"2")


def fill_disk(filler):
    """Append to the file ``filler`` until its disk is full."""
    with suppress(OSError), filler.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_prepared_datasets_that_are_not_kept_are_removed_from_a_full_disk(small_disk):
    store = LocalStore(str(small_disk / "store"))
    kept, released = leases.take(store, "kept", 60.0), leases.take(store, "released", 0.0)
    for dataset_id in ("kept", "released"):
        store.publish(layout.manifest_path(dataset_id), b"{}")
    filler = small_disk / "filler"
    fill_disk(filler)
    released.release()
    assert store.list("") == [layout.manifest_path("kept"), kept.path]
    fill_disk(filler)
    with pytest.raises(StoreError, match="No space left on device"):
        kept.release()
    assert store.list("") == [layout.manifest_path("kept"), kept.path]


def test_the_error_of_a_full_disk_for_buffered_uploads_names_its_folder(small_disk, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    store = Store.create("memory://full-disk")
    message = rf"Cannot buffer the content of memory://.*full-disk/x in {small_disk}: No space left on device"

    def write_too_much():
        with store.open("x", "wb") as file:
            for _ in range(40):
                file.write(bytes(1024 * 1024))

    with pytest.raises(StoreError, match=message):
        write_too_much()
    assert store.list("") == []


def test_a_disk_that_is_full_at_the_end_of_a_buffered_upload_is_named(small_disk, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    monkeypatch.setattr(remote_file, "SPOOL_BYTES", 1)
    store = Store.create("memory://full-disk-at-the-end")

    def write_until_full():
        with store.open("x", "wb") as file:
            file.write(bytes(2))
            fill_disk(small_disk / "filler")
            file.write(bytes(6000))  # fits into Python's own buffer, so that only close() needs the disk

    with pytest.raises(StoreError, match=rf"Cannot buffer .*/x in {small_disk}: No space left on device"):
        write_until_full()
    assert store.list("") == []


def test_a_model_that_does_not_fit_on_the_local_disk_is_an_error_that_names_the_folder(small_disk, tmp_path):
    store = LocalStore(str(tmp_path / "store"))
    file = job_files.write(store, "model/weights", bytes(2_000_000))
    with (
        pytest.raises(StoreError, match=rf"Cannot write the model to .* {small_disk}/sparkhvd-.*: No space left on"),
        job_files.local_copies(store, (file,), str(small_disk)),
    ):
        pytest.fail("the copies are incomplete")
    assert not list(small_disk.iterdir())


def test_a_removed_folder_is_named_in_errors_and_created_again_by_a_later_write(tmp_path):
    store = LocalStore(str(tmp_path / "store"))
    with store.open("x.parquet", "wb") as file:
        parquet.write_table(pa.table({"x": range(100_000)}), file, row_group_size=1000)
    filesystem, path = store.arrow("x.parquet")
    with filesystem.open_input_file(path) as file:
        opened = parquet.ParquetFile(file)
        shutil.rmtree(store.root)
        assert opened.read().num_rows == 100_000, "an open file stays readable"
    with pytest.raises(StoreError, match=rf"Cannot open file://{store.root}/x\.parquet: No such file"):
        store.open("x.parquet", "rb")
    assert store.list("") == []
    assert not store.exists("x.parquet")
    store.publish("y", b"1")
    assert store.list("") == ["y"]


@pytest.mark.parametrize("use", [lambda store: store.publish("x", b"1"), lambda store: store.list("")])
def test_old_leftovers_of_a_killed_writer_are_removed_by_a_later_user_of_the_folder(tmp_path, use):
    store = LocalStore(str(tmp_path))
    for name, age in (("old", 25 * 3600), ("new", 3600)):
        leftover = tmp_path / f".{name}.unfinished"
        leftover.write_bytes(b"half")
        os.utime(leftover, (time.time() - age,) * 2)
    (tmp_path / "before").touch()
    use(store)
    assert sorted({path.name for path in tmp_path.iterdir()} - {"x"}) == [".new.unfinished", "before"]
    assert ".new.unfinished" not in store.list("")


def test_a_read_only_folder_is_refused_when_the_store_is_created():
    if os.getuid() != 0:
        pytest.skip("becoming another user needs root")
    # Root may write everywhere, so this test becomes another user, who cannot enter pytest's private folders.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        code = (
            f"import os; from sparkhvd.store.backends.local import LocalStore; os.setuid(65534); LocalStore({folder!r})"
        )
        completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"The Store file://{folder} is not readable and writable for this user" in completed.stderr


@pytest.mark.parametrize("form", ["dbfs:/{}", "/dbfs/{}", "file:/dbfs/{}", "file:///dbfs/{}"])
def test_on_databricks_all_paths_of_a_folder_give_the_same_store(form, tmp_path, monkeypatch):
    name = tmp_path.name
    had_mount = Path("/dbfs").exists()
    try:
        Path("/dbfs", name).mkdir(parents=True)
    except PermissionError:
        pytest.skip("making /dbfs, where Databricks mounts its files, needs root")
    try:
        outside_databricks = Store.create(f"/dbfs/{name}")
        assert type(outside_databricks) is LocalStore
        monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
        store = Store.create(form.format(name))
        assert type(store).__name__ == "DBFSStore"
        assert store.root == f"/dbfs/{name}"
        assert store.spark_url("a/b") == f"dbfs:/{name}/a/b"
    finally:
        shutil.rmtree(Path("/dbfs", name))
        if not had_mount:
            Path("/dbfs").rmdir()
