"""Stores in folders that are full, removed or read-only, or that have leftovers of a killed writer."""

from __future__ import annotations

import ctypes
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
from sparkhvd.store.access import disk, remote_file
from sparkhvd.store.backends.read_only import ReadOnlyFolder


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


@pytest.fixture
def silent_disk(tmp_path, monkeypatch):
    """Mount a file system whose server never answers; provide its folder."""
    monkeypatch.setattr(disk, "SILENCE_SECONDS", 0.2)
    folder = tmp_path / "silent"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"mounting a silent disk needs FUSE: {error}")
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"silent", str(folder).encode(), b"fuse", 0, options):
        os.close(server)
        pytest.skip(f"mounting a silent disk needs the right to mount: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        os.close(server)  # ends the waiting calls with an error
        libc.umount2(str(folder).encode(), 2)  # MNT_DETACH


def test_a_disk_that_does_not_answer_is_named(silent_disk, tmp_path):
    store = LocalStore(str(tmp_path))
    folder = silent_disk.name
    read_only = ReadOnlyFolder(str(tmp_path))
    for action, act in (
        ("use the folder", lambda: LocalStore(str(silent_disk / "store"))),
        ("look up", lambda: store.exists(f"{folder}/a")),
        ("open", lambda: store.open(f"{folder}/a", "rb")),
        ("open", lambda: store.open(f"{folder}/a", "wb")),
        ("list", lambda: store.list(folder)),
        ("publish", lambda: store.publish(f"{folder}/a", b"")),
        ("delete", lambda: store.delete(f"{folder}/a")),
        ("look up", lambda: read_only.exists(f"{folder}/a")),
        ("open", lambda: read_only.open(f"{folder}/a", "rb")),
        ("list", lambda: read_only.list(folder)),
    ):
        message = f"Cannot {action} file://{silent_disk}.*: its file system has not answered"
        with pytest.raises(StoreError, match=message):
            act()


def test_a_disk_that_stops_to_answer_ends_reads_and_writes(tmp_path, monkeypatch):
    """A pipe that nobody fills or empties takes the part of the disk."""
    monkeypatch.setattr(disk, "SILENCE_SECONDS", 0.2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    other_end = os.open(pipe, os.O_RDWR)
    try:
        with disk.DiskFile(pipe, "wb", "file:///there") as file:
            with pytest.raises(StoreError, match="Cannot write file:///there: its file system has not answered"):
                file.write(bytes(200_000))
            received = 0
            while received < 200_000:  # the abandoned call ends
                received += len(os.read(other_end, 200_000))
        with disk.open_to_read(pipe, "file:///there") as file:
            with pytest.raises(StoreError, match="Cannot read file:///there: its file system has not answered"):
                file.read(1)
            os.write(other_end, b"x")
    finally:
        os.close(other_end)
