from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark import SparkFiles

from sparkhvd.data.external.parquet_files import open_existing
from sparkhvd.data.read.readers import ReadOptions
from sparkhvd.errors import StoreError
from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.runs.run_lease import Fence
from sparkhvd.estimators.training import checkpoint, job_files
from sparkhvd.estimators.training.checkpoint import Checkpoint
from sparkhvd.estimators.training.worker import StoredRows, _stored_rows
from sparkhvd.store import Store, layout
from sparkhvd.world import World
from tests.unit.estimators.arrays import spec


@pytest.fixture
def store(tmp_path):
    return Store.create(str(tmp_path / "store"))


def after(epoch):
    times = {"rows_per_second": 10.0, "step_seconds": 0.5, "shares": {"compute": 1.0}}
    history = tuple(EpochRecord(e, {"loss": 1.0 / (e + 1)}, {"loss": 2.0}, **times) for e in range(epoch + 1))
    return Checkpoint(epoch, 7, history, b"weights\n\x00of epoch %d" % epoch)


def test_a_loaded_checkpoint_equals_the_saved_one(store):
    checkpoint.save(Fence(store, "run", 0), after(2))
    assert checkpoint.load(store, checkpoint.latest(store, "run")) == after(2)


def test_only_the_last_checkpoint_is_kept(store):
    for epoch in range(12):
        checkpoint.save(Fence(store, "run", 0), after(epoch))
    assert store.list(layout.checkpoints_folder("run")) == [layout.checkpoint_path("run", 11)]
    assert checkpoint.load(store, checkpoint.latest(store, "run")).epoch == 11


def test_ranks_that_resume_before_the_end_of_a_run_replace_that_end(store):
    """Rank 0 of an elastic fit may be lost just after it has saved that a callback ended the run."""
    checkpoint.save_final(Fence(store, "run", 1), replace(after(1), ended=True))
    checkpoint.save(Fence(store, "run", 2), after(1))
    assert checkpoint.load(store, checkpoint.latest(store, "run")) == after(1)
    assert store.list(layout.checkpoints_folder("run")) == [layout.checkpoint_path("run", 1, token=2)]


def test_a_run_without_checkpoints_has_no_latest_checkpoint(store):
    assert checkpoint.latest(store, "run") is None


def test_two_runs_with_one_id_cannot_overwrite_each_others_checkpoint(store):
    checkpoint.save(Fence(store, "run", 0), after(0))
    with pytest.raises(StoreError, match="epoch-00000"):
        checkpoint.save(Fence(store, "run", 0), after(0))


def test_a_file_that_is_not_a_checkpoint_is_an_error_with_a_remedy(store):
    store.publish(layout.checkpoint_path("run", 3), b"not a checkpoint")
    with pytest.raises(
        StoreError, match=r"epoch-00003 is not a checkpoint that this version can read .* another run_id"
    ):
        checkpoint.load(store, checkpoint.latest(store, "run"))


def test_a_changed_file_is_not_read(store):
    written = job_files.write(store, "runs/r/model/module.pkl", b"content")
    assert written.read(store) == b"content"
    store.delete(written.path)
    store.publish(written.path, b"contend")
    with pytest.raises(
        StoreError, match=r"module\.pkl was changed or truncated after it was written: its SHA-256 differs"
    ):
        written.read(store)


def test_small_payloads_are_sent_with_the_job_and_large_ones_as_a_file(store, monkeypatch):
    monkeypatch.setattr(job_files, "INLINE_BYTES", 10)
    small, large = job_files.to_payload(store, "small", b"x" * 10), job_files.to_payload(store, "large", b"y" * 11)
    assert (small.file, small.read(store)) == (None, b"x" * 10)
    assert (large.content, large.read(store)) == (b"", b"y" * 11)
    assert store.list("") == ["large"]


def test_local_copies_are_removed_at_the_end(store, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"1")
    (tmp_path / "a" / "two").write_bytes(b"2")
    written = job_files.write_folder(store, "folder", tmp_path / "a")
    with job_files.local_copies(store, written) as folder:
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == {"one": b"1", "two": b"2"}
    assert not folder.exists()


def test_options_that_change_the_order_of_rows_change_the_division(tmp_path):
    (tmp_path / "rows").mkdir()
    parquet.write_table(pa.table({"x": [1.0] * 9, "y": [2.0] * 9}), tmp_path / "rows" / "one.parquet", row_group_size=3)
    files = open_existing(str(tmp_path / "rows"), feature_cols=["x"], label_cols=["y"])

    def division(**how):
        data = files.manifest.schema
        return _stored_rows(StoredRows(files.store, files.manifest), spec(data, **how), World(rank=0, size=1)).division

    memory, disk = ReadOptions(cache="memory"), ReadOptions(cache="disk")
    digests = [
        division(),
        division(reading=memory),
        division(shuffle=False),
        division(reading=ReadOptions(window_bytes=40)),
    ]
    assert len(set(digests)) == 4, digests
    assert division(epochs=5) == digests[0]
    assert division(reading=disk) == digests[1], "the location of the cache does not matter"
    assert division(reading=memory, shuffle=False) == digests[2], "without shuffling a cache changes nothing"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_number_of_ranks_validates_on_the_rows_of_the_fixed_number_of_shards(tmp_path, size):
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        table = pa.table({"x": [float(row) for row in range(30)], "y": [0.0] * 30})
        parquet.write_table(table, tmp_path / split / "one.parquet", row_group_size=5)
    folders = (str(tmp_path / split) for split in ("train", "validation"))
    files = open_existing(*folders, feature_cols=["x"], label_cols=["y"])
    stored, how = StoredRows(files.store, files.manifest), {"validation_steps_per_epoch": 2}

    def validated(shards, size):
        """Return the rows of every step."""
        of_ranks = [
            _stored_rows(stored, spec(files.manifest.schema, shards=shards, **how), World(rank=rank, size=size))
            for rank in range(size)
        ]
        steps = zip(*[rows.validation.epoch(0) for rows in of_ranks], strict=True)
        return [sorted(x for batch in step for x in batch.columns["x"].tolist()) for step in steps]

    assert validated(3, size) == validated(None, 3)


def test_files_that_spark_did_not_accept_are_added_by_the_next_transform(tmp_path, monkeypatch):
    added = []

    def add(file):
        if not added:
            added.append("failed")
            raise OSError("interrupted")
        added.append(Path(file).read_bytes())

    monkeypatch.setattr(SparkFiles, "getRootDirectory", lambda: str(tmp_path))
    session = SimpleNamespace(sparkContext=SimpleNamespace(addFile=add))
    files = job_files.InMemoryFiles((("model/weights", b"content"),))
    with pytest.raises(OSError, match="interrupted"):
        files.sent_with(session)
    files.sent_with(session)
    files.sent_with(session)
    assert added == ["failed", b"content"]
