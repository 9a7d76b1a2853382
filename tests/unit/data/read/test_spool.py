from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest

from sparkhvd.config import given_rows, given_rows_variable, local_folders
from sparkhvd.data.read.blocks import ArrowBlocks
from sparkhvd.data.read.shards import Piece
from sparkhvd.data.read.spool import Spool
from sparkhvd.errors import StoreError


def batch(values, parts=None):
    columns = {"x": pa.array(values, pa.int64())}
    if parts is not None:
        columns["part"] = pa.array(parts)
    return pa.RecordBatch.from_pydict(columns)


@pytest.fixture
def spool(tmp_path):
    made = Spool([str(tmp_path)], by="part", otherwise="train")
    yield made
    made.close()


def test_rows_go_into_one_file_per_value_and_keep_their_order(spool):
    spool.write(batch([1, 2, 3], ["train", "validation", "train"]))
    spool.write(batch([4], ["validation"]))
    spool.write(batch([]))
    written = {part: ArrowBlocks(path, part) for part, path in spool.finish().items()}
    rows = {
        part: [blocks.whole(n).column("x").to_pylist() for n in range(blocks.count)] for part, blocks in written.items()
    }
    assert rows == {"train": [[1, 3]], "validation": [[2], [4]]}
    assert written["train"].whole(0).schema.names == ["x"]


def test_rows_without_the_column_go_to_the_stated_file(spool):
    spool.write(batch([1, 2]))
    (path,) = spool.finish().values()
    (piece,) = ArrowBlocks(path, "here").batches(Piece(0, 1, 2))
    assert piece.column("x").to_pylist() == [2]


def test_the_files_are_anonymous_and_can_be_mapped_by_other_processes(spool, tmp_path):
    spool.write(batch(list(range(1000))))
    paths = spool.finish()
    assert list(tmp_path.iterdir()) == []
    script = "import sys, pyarrow as pa; print(pa.ipc.open_file(pa.memory_map(sys.argv[1])).read_all().num_rows)"
    done = subprocess.run([sys.executable, "-c", script, paths["train"]], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1000"


def test_a_spool_without_rows_has_no_files(spool):
    assert spool.finish() == {}


def test_the_first_writable_folder_is_used(tmp_path):
    spool = Spool(["/does/not/exist", str(tmp_path)], by="part", otherwise="train")
    spool.write(batch([1]))
    assert list(spool.finish()) == ["train"]
    spool.close()


def test_unwritable_folders_are_named():
    spool = Spool(["/does/not/exist"], by="part", otherwise="train")
    with pytest.raises(
        StoreError, match=r"could not write its rows to the local disk \(/does/not/exist\): No such file"
    ):
        spool.write(batch([1]))


def test_a_full_disk_is_a_clear_error(tmp_path):
    """Limit the size of files as a substitute for a full disk."""

    spool = Spool([str(tmp_path)], by="part", otherwise="train")
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1][1]))
    try:
        with pytest.raises(StoreError, match=r"could not write its rows to the local disk .*data='store'"):
            spool.write(batch(list(range(100_000))))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[1])
        signal.signal(signal.SIGXFSZ, before[0])
        spool.close()


def test_the_paths_of_the_files_are_passed_in_a_variable(monkeypatch):
    assert given_rows() == {}
    assert given_rows_variable({}) == ()
    for name, value in given_rows_variable({"train": "/proc/1/fd/2"}):
        monkeypatch.setenv(name, value)
    assert given_rows() == {"train": "/proc/1/fd/2"}


def test_sparks_local_folders_precede_the_temporary_folder(monkeypatch):
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/one,/two")
    assert local_folders() == ("/one", "/two", os.environ["TMPDIR"])
    assert Path(local_folders()[-1]).is_dir()


def test_without_a_temporary_folder_only_sparks_local_folders_are_used(monkeypatch):
    def no_folder() -> str:  # as in a container with a read-only file system
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/one,/two")
    assert local_folders() == ("/one", "/two")
