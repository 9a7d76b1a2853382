from __future__ import annotations

import gc
import resource
import signal
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from sparkhvd.data import ColumnSpec, DataSchema, ParquetSource, head
from sparkhvd.data.read.batches import Batch
from sparkhvd.data.read.prefetch import StoppedError, StopSignal
from sparkhvd.data.read.readers import ReadOptions
from sparkhvd.data.read.regroup import RegroupedSource
from sparkhvd.data.read.resume import EpochRemainder
from sparkhvd.errors import ConfigError, DataError, StoreError
from sparkhvd.world import World
from tests.unit.data.conftest import SCHEMA, expected, table_of
from tests.waiting import wait_for

FILES = ((40, 1, 59), (100,), (7, 93))


def world_of(rank, size):
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


def source_of(
    store, manifest, *, rank=0, size=1, batch=16, split="train", shuffle=False, steps_per_epoch=None, **options
):
    world, reading = world_of(rank, size), ReadOptions(**options)
    return ParquetSource(
        store, manifest, split, world, batch, seed=5, shuffle=shuffle, steps_per_epoch=steps_per_epoch, reading=reading
    )


def reader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("sparkhvd-read-")]


def assert_rows(batch, ids):
    want = expected(ids)
    assert batch.rows == len(ids)
    assert list(batch.columns) == SCHEMA.names()
    for column in SCHEMA.columns:
        values = batch.columns[column.name]
        assert values.dtype == np.dtype(column.dtype)
        assert values.shape == (len(ids), *column.shape)
        assert values.flags.c_contiguous
        assert values.flags.writeable
        np.testing.assert_array_equal(values, want[column.name])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle": True}, {"shuffle": True, "window_bytes": 700}, {"threads": 1, "prefetch_bytes": 1}]
    + [{"shuffle": shuffle, "cache": kind} for shuffle in (False, True) for kind in ("memory", "disk")],
    ids=str,
)
def test_every_rank_reads_exactly_the_rows_of_the_plan(store, make_dataset, tmp_path, size, options):
    manifest = make_dataset(FILES)
    if options.get("cache") == "disk":
        options = {**options, "cache_folder": str(tmp_path)}
    sources = [source_of(store, manifest, rank=rank, size=size, **options) for rank in range(size)]
    for epoch in (0, 1):
        ranks = [list(source.epoch(epoch)) for source in sources]
        plan = list(sources[0].plan.global_batches(epoch))
        assert [len(batches) for batches in ranks] == [sources[0].steps()] * size
        for step, ids_of_rank in enumerate(plan):
            for batches, ids in zip(ranks, ids_of_rank, strict=True):
                assert_rows(batches[step], ids)
            assert {batches[step].global_rows for batches in ranks} == {sum(map(len, ids_of_rank))}
            assert sum(batches[step].share for batches in ranks) == pytest.approx(1)
        assert sources[0].rows() == 300


def test_the_previous_test_reads_windows_of_several_blocks(store, make_dataset):
    plan = source_of(store, make_dataset(FILES), shuffle=True, window_bytes=700).plan
    assert 1 < plan.window_rows < plan.total_rows


def test_a_rank_without_rows_in_a_step_gets_an_empty_batch(store, make_dataset):
    manifest = make_dataset(((9,),))
    last = list(source_of(store, manifest, rank=1, size=2, batch=4).epoch(0))[-1]
    assert_rows(last, [])
    assert (last.rows, last.global_rows, last.share) == (0, 1, 0.0)


def test_the_validation_rows_are_read_from_their_own_files(store, make_dataset):
    manifest = make_dataset(((5,),), validation=((3,), (2,)))
    batches = list(source_of(store, manifest, split="validation", batch=5).epoch(0))
    assert_rows(batches[0], [0, 1, 2, 3, 4])
    assert source_of(store, manifest, split="validation").rows() == 5


def test_more_steps_than_one_pass_continue_and_fewer_stop(store, make_dataset):
    manifest = make_dataset(((10,),))
    batches = list(source_of(store, manifest, batch=4, steps_per_epoch=5).epoch(0))
    assert [batch.columns["id"].tolist() for batch in batches] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert len(list(source_of(store, manifest, batch=4, steps_per_epoch=1).epoch(0))) == 1


def test_batches_do_not_share_memory(store, make_dataset):
    for shuffle in (False, True):
        first, second = list(
            source_of(store, make_dataset(((8,),), dataset_id=f"d{shuffle}"), batch=4, shuffle=shuffle).epoch(0)
        )
        before = second.columns["id"].copy()
        first.columns["id"][:] = -1
        np.testing.assert_array_equal(second.columns["id"], before)


def test_head_returns_the_first_rows_across_row_groups_and_files(store, make_dataset):
    manifest = make_dataset(((2, 0, 1), (4,)))
    assert_rows(Batch(head(store, manifest, 5), 5, 5), range(5))
    assert_rows(Batch(head(store, manifest, 100), 7, 7), range(7))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_rank_decodes_only_its_part_of_the_row_groups_and_each_group_once(store, make_dataset, monkeypatch, shuffle):
    decoded = []
    original = parquet.ParquetFile.iter_batches

    def counted(self, *arguments, **options):
        decoded.append((self.metadata.num_rows, options["row_groups"][0]))
        return original(self, *arguments, **options)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", counted)
    manifest = make_dataset(tuple((6 + index,) * 6 for index in range(4)))  # unique row counts
    for rank in (0, 1):
        list(source_of(store, manifest, rank=rank, size=2, batch=3, shuffle=shuffle, window_bytes=700).epoch(0))
        assert len(decoded) == len(set(decoded)) <= 15  # half of the 24 row groups, and parts of two more
        decoded.clear()


@pytest.mark.parametrize("cache", [None, "memory", "disk"])
def test_rows_that_fit_into_a_window_are_decoded_once_and_drawn_row_by_row(
    store, make_dataset, monkeypatch, tmp_path, cache
):
    decoded = []
    original = parquet.ParquetFile.iter_batches

    def counted(self, *arguments, **options):
        decoded.append(options["row_groups"][0])
        return original(self, *arguments, **options)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", counted)
    manifest = make_dataset(((150, 150),))
    options = {"shuffle": True, "cache": cache, "cache_folder": str(tmp_path)}
    sources = [source_of(store, manifest, rank=rank, size=2, **options) for rank in (0, 1)]
    for epoch in (0, 1):
        ids = [np.concatenate([batch.columns["id"] for batch in source.epoch(epoch)]) for source in sources]
        assert sorted(np.concatenate(ids).tolist()) == list(range(300))
        assert all(60 < np.count_nonzero(of_rank < 150) < 90 for of_rank in ids)
    assert sorted(decoded) == [0, 0, 1, 1]


def test_closing_the_iterator_ends_the_thread(store, make_dataset):
    batches = source_of(store, make_dataset(((5000,),)), batch=1, prefetch_bytes=1).epoch(0)
    next(batches)
    assert len(reader_threads()) > 0
    batches.close()
    assert reader_threads() == []


def test_dropping_the_iterator_ends_the_thread(store, make_dataset):
    batches = source_of(store, make_dataset(((5000,),)), batch=1, prefetch_bytes=1).epoch(0)
    next(batches)
    del batches
    gc.collect()
    assert reader_threads() == []


@pytest.mark.parametrize("most", [1, 2])
def test_no_thread_stays_if_the_system_starts_no_more_of_them(store, make_dataset, monkeypatch, most):
    start, manifest = threading.Thread.start, make_dataset(FILES)

    def start_at_most(thread):
        if thread.name.startswith("sparkhvd-read-") and len(reader_threads()) == most:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_at_most)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        next(source_of(store, manifest, threads=2, prefetch_bytes=1).epoch(0))
    wait_for(lambda: reader_threads() == [])


def test_a_consumer_that_raises_ends_the_thread(store, make_dataset):
    def consume():
        for _ in source_of(store, make_dataset(((5000,),)), batch=1, prefetch_bytes=1).epoch(0):
            raise RuntimeError("in training")

    with pytest.raises(RuntimeError, match="in training"):
        consume()
    gc.collect()
    assert reader_threads() == []


@pytest.mark.parametrize("kind", ["rank", "regrouped", "remainder"])
def test_another_thread_stops_an_epoch_that_waits_for_rows(store, make_dataset, kind):
    reads, proceed, stop = threading.Event(), threading.Event(), StopSignal()

    def slow(columns):
        reads.set()
        assert proceed.wait(60)
        return columns

    rank = source_of(store, make_dataset(((50,),)), transformation=slow, made=SCHEMA)
    source = {
        "rank": rank,
        "regrouped": RegroupedSource(lambda _: rank, 1, world_of(0, 1)),
        "remainder": EpochRemainder(rank, 0, 1, lambda _: rank, rank.plan, world_of(0, 1)),
    }[kind]
    with ThreadPoolExecutor(1) as consumer:
        batches = consumer.submit(list, source.epoch(0, 0, stop))
        assert reads.wait(60)
        stop.stop()
        proceed.set()
        with pytest.raises(StoppedError):
            batches.result(60)
    with pytest.raises(StoppedError):
        list(source.epoch(0, 0, stop))
    assert reader_threads() == []


def path_of(store, manifest, index=0):
    return Path(store.root, manifest.folder, manifest.train.files[index].path)


def test_a_missing_file_is_named_in_the_trainer(store, make_dataset):
    manifest = make_dataset(((10,), (10,)))
    path_of(store, manifest, 1).unlink()
    with pytest.raises(StoreError, match=r"Cannot read file://.*/rows/train-1.parquet: .*No such file"):
        list(source_of(store, manifest).epoch(0))
    assert reader_threads() == []


def test_a_folder_that_disappears_in_mid_epoch_is_an_error_that_names_a_file(store, make_dataset):
    manifest = make_dataset(((10_000,),) * 8)
    batches = source_of(store, manifest, batch=10, threads=1, prefetch_bytes=1).epoch(0)
    next(batches)
    store.delete(manifest.folder)
    with pytest.raises(StoreError, match=r"Cannot read file://.*/rows/train-\d.parquet: .*No such file"):
        list(batches)
    assert reader_threads() == []


def test_the_cache_is_in_the_first_writable_local_folder(store, make_dataset, monkeypatch):
    source = source_of(store, make_dataset(((10,),)), cache="disk")
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/does/not/exist")
    assert sum(batch.rows for batch in source.epoch(0)) == 10
    monkeypatch.setattr("tempfile.tempdir", "/nor/does/this")
    source = source_of(store, make_dataset(((10,),), dataset_id="other"), cache="disk")
    with pytest.raises(StoreError, match=r"disk in /does/not/exist, /nor/does/this: No such file"):
        list(source.epoch(0))


@example(files=((1,),), size=2, batch=1, shuffle=True, epoch=0, start=0.0)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple),
    size=st.integers(1, 4),
    batch=st.integers(1, 7),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
    start=st.floats(0, 1, exclude_max=True),
)
def test_every_row_is_read_once_per_epoch_even_after_a_later_start(
    store, make_dataset, *, files, size, batch, shuffle, epoch, start
):
    manifest = make_dataset(files, dataset_id=uuid.uuid4().hex)
    ranks = [
        source_of(store, manifest, rank=rank, size=size, batch=batch, shuffle=shuffle, window_bytes=200)
        for rank in range(size)
    ]
    steps = ranks[0].steps()
    seen = []
    first = int(start * steps)
    for source in ranks:
        batches = list(source.epoch(epoch))
        ids = [one.columns["id"].tolist() for one in batches]
        assert len(batches) == steps
        assert all(len(some) == one.rows <= batch for some, one in zip(ids, batches, strict=True))
        assert [one.columns["id"].tolist() for one in source.epoch(epoch, first)] == ids[first:]
        seen += [row for some in ids for row in some]
    assert sorted(seen) == list(range(sum(map(sum, files))))


def test_a_full_disk_for_the_cache_is_a_clear_error(store, make_dataset, tmp_path):
    """Limit the size of files as a substitute for a full disk."""
    manifest = make_dataset(((20_000,),))
    source = source_of(store, manifest, cache="disk", cache_folder=str(tmp_path))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1][1]))
    try:
        with pytest.raises(StoreError, match=r"Cannot keep rows on the local disk in .*: File too large"):
            list(source.epoch(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[1])
        signal.signal(signal.SIGXFSZ, before[0])
    assert [path.name for path in tmp_path.iterdir() if path.name != "store"] == []


def test_a_cached_epoch_needs_no_store(store, make_dataset, tmp_path):
    for kind in ("memory", "disk"):
        manifest = make_dataset(((50, 50), (60,)), dataset_id=kind)
        options = {"shuffle": True, "window_bytes": 700, "cache": kind, "cache_folder": str(tmp_path)}
        source = source_of(store, manifest, rank=1, size=2, **options)
        open_files = len(list(Path("/proc/self/fd").iterdir()))
        first = sorted(i for batch in source.epoch(0) for i in batch.columns["id"].tolist())
        assert len(list(Path("/proc/self/fd").iterdir())) == open_files, "there may be more row groups than open files"
        store.delete(manifest.folder)
        again = [i for batch in source.epoch(1) for i in batch.columns["id"].tolist()]
        assert sorted(again) == first != again


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "window_bytes": 700}, {"shuffle": True, "cache": "memory"}])
def test_a_rank_resumes_at_a_step_with_the_remaining_batches(store, make_dataset, options):
    source = source_of(store, make_dataset(FILES), rank=1, size=2, batch=7, **options)
    whole = [batch.columns["id"].tolist() for batch in source.epoch(1)]
    for step in (0, 1, 10, len(whole)):
        assert [batch.columns["id"].tolist() for batch in source.epoch(1, step)] == whole[step:]
    with pytest.raises(ConfigError, match="first_step is 99; it must be from 0 to 22, the steps"):
        source.epoch(1, 99)


def test_a_truncated_file_is_named(store, make_dataset):
    manifest = make_dataset(((10,),))
    content = path_of(store, manifest).read_bytes()
    path_of(store, manifest).write_bytes(content[: len(content) // 2])
    with pytest.raises(StoreError, match=r"Cannot read file://.*/rows/train-0.parquet"):
        list(source_of(store, manifest).epoch(0))


@pytest.mark.parametrize("rows", [9, 11, 0])
def test_row_counts_that_differ_from_the_manifest_are_an_error(store, make_dataset, rows):
    manifest = make_dataset(((10,),))
    parquet.write_table(table_of(range(rows)), path_of(store, manifest))
    with pytest.raises(
        DataError, match=r"row groups of \[.*\] rows, but the manifest says \[10\]: the dataset was changed"
    ):
        list(source_of(store, manifest).epoch(0))


def test_a_schema_without_shapes_and_wrong_numbers_are_refused(store, make_dataset):
    manifest = make_dataset()
    with pytest.raises(ConfigError, match="prefetch_bytes is 0"):
        source_of(store, manifest, prefetch_bytes=0)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        source_of(store, manifest, batch=0)
    unknown = DataSchema((ColumnSpec("a.b", "float32", None, "feature", "array"),))
    with pytest.raises(DataError, match=r"The shape of column 'a.b' is unknown"):
        source_of(store, make_dataset(dataset_id="e", schema=SCHEMA.replaced(unknown.columns)))


def test_an_empty_batch_has_the_columns_of_the_transformation(store, make_dataset):
    made = DataSchema((ColumnSpec("id", "float32", (2,), "feature", "array"),))

    def never(columns):
        raise AssertionError("there are no rows to transform")

    source = source_of(store, make_dataset(((4,),)), rank=4, size=5, batch=1, transformation=never, made=made)
    (batch,) = source.epoch(0)
    assert (batch.rows, source.schema) == (0, made)
    assert {name: (array.shape, array.dtype) for name, array in batch.columns.items()} == {"id": ((0, 2), "float32")}
    assert not source.has_rows(0)
