from __future__ import annotations

import gc
import itertools
import json
import pickle
import shutil
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from sparkhvd._util.processes.process_identity import machine_id
from sparkhvd.data import torch_loader
from sparkhvd.data.external import parquet_files
from sparkhvd.data.external.parquet_files import ExistingFiles, open_data, open_existing
from sparkhvd.data.prepare import prepared_data
from sparkhvd.data.prepare.prepare import WriteOptions
from sparkhvd.data.prepare.prepared_data import PreparedData, _find_by_fingerprint, _find_by_name, clean, hold
from sparkhvd.data.reuse import leases
from sparkhvd.data.reuse.fingerprint import Fingerprint
from sparkhvd.data.schema.selection import Selection
from sparkhvd.errors import DataError, SchemaError, StoreError
from sparkhvd.store import layout
from tests.unit.data.conftest import SCHEMA
from tests.waiting import wait_for


def ids_of(store):
    return sorted({path.split("/")[1] for path in store.list("datasets")})


def write_lease(store, dataset_id, **changes):
    """Write a lease like another process."""
    record = {"machine": "elsewhere", "pid": 1, "started": "1", "taken": time.time(), "keep_seconds": 60.0, **changes}
    store.publish(layout.lease_path(dataset_id, f"{record['taken']:017.6f}-other"), json.dumps(record).encode())


def release_long_ago(store, dataset_id, keep_seconds):
    content = {"time": time.time() - 1000, "keep_seconds": keep_seconds}
    with store.open(layout.lease_path(dataset_id, "released"), "wb") as file:
        file.write(json.dumps(content).encode())


def test_a_dataset_that_is_not_kept_is_removed_with_its_last_lease(store, make_dataset):
    make_dataset(dataset_id="d")
    first, second = leases.take(store, "d", 0.0), leases.take(store, "d", 0.0)
    first.release()
    assert ids_of(store) == ["d"]
    second.release()
    assert store.list("") == []


def test_a_kept_dataset_stays_until_it_expires(store, make_dataset):
    make_dataset(dataset_id="d")
    leases.take(store, "d", 100.0).release()
    assert leases.remove_expired(store) == []
    release_long_ago(store, "d", 999.0)
    assert leases.remove_expired(store) == ["d"]
    assert store.list("") == []


def test_a_new_use_restarts_the_expiry(store, make_dataset):
    make_dataset(dataset_id="d")
    release_long_ago(store, "d", 10.0)
    leases.take(store, "d", 100.0).release()
    assert leases.remove_expired(store) == []


def test_a_held_dataset_is_not_removed_at_any_age(store, make_dataset):
    make_dataset(dataset_id="d")
    release_long_ago(store, "d", 0.0)
    lease = leases.take(store, "d", 0.0)
    assert leases.remove_expired(store) == leases.remove_all_unused(store) == []
    assert ids_of(store) == ["d"]
    lease.release()


def test_a_lease_of_this_machine_ends_with_its_process(store, make_dataset):
    make_dataset(dataset_id="d")
    code = (
        "import sys; from sparkhvd.store import LocalStore; from sparkhvd.data.reuse import leases\n"
        "leases.take(LocalStore(sys.argv[1]), 'd', 0.0); print('taken', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, store.root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "taken\n"
        assert leases.remove_all_unused(store) == []
        holder.kill()
    assert leases.remove_all_unused(store) == ["d"]


def test_a_lease_of_another_machine_is_valid_for_a_week(store, make_dataset):
    make_dataset(dataset_id="d")
    write_lease(store, "d", taken=time.time() - leases.BELIEVED_SECONDS + 60)
    assert leases.remove_all_unused(store) == []
    make_dataset(dataset_id="e")
    write_lease(store, "e", taken=time.time() - leases.BELIEVED_SECONDS - 60)
    assert leases.remove_all_unused(store) == ["e"]


def test_the_remains_of_a_killed_preparation_are_removed_at_once(store):
    with store.open(f"{layout.dataset_rows_folder('d')}/part-0", "wb") as file:
        file.write(b"half")
    write_lease(store, "d", machine=machine_id(), pid=2**22 + 1, keep_seconds=1e9)
    assert leases.remove_expired(store) == ["d"]
    assert store.list("") == []


def test_a_file_that_arrives_after_the_removal_of_its_dataset_is_removed_by_clean(store, make_dataset):
    gone, copied, prepared = (layout.new_dataset_id() for _ in range(3))
    make_dataset(dataset_id=gone)
    leases.take(store, gone, 0.0).release()
    late = f"{layout.dataset_rows_folder(gone)}/sparkhvd_split=train/part-00001-x-c000.snappy.parquet"
    store.publish(late, b"late")
    make_dataset(dataset_id=copied)  # has a manifest, but no lease
    writing = leases.take(store, prepared, 0.0)
    store.publish(f"{layout.dataset_rows_folder(prepared)}/part-00000.parquet", b"so far")
    own = ["datasets/imagenet/rows/a.parquet", f"datasets/{layout.new_dataset_id()}/mine.parquet"]
    for path in own:
        store.publish(path, b"the user's")
    kept = [path for path in store.list("") if path != late]
    assert clean(store) == [gone]
    assert store.list("") == kept
    writing.withdraw()
    assert clean(store) == [prepared]


def test_a_damaged_lease_holds_nothing(store, make_dataset):
    make_dataset(dataset_id="d")
    store.publish(layout.lease_path("d", "damaged"), b'{"machine": 1')
    assert leases.remove_expired(store) == ["d"]


def test_a_removal_restores_the_manifest_if_another_lease_appears_meanwhile(store, make_dataset, monkeypatch):
    manifest = make_dataset(dataset_id="d")
    release_long_ago(store, "d", 0.0)
    original, taken = type(store).delete, []

    def delete(self, path):
        original(self, path)
        if path == manifest.path and not taken:
            taken.append(leases.take(store, "d", 0.0))  # another driver takes a lease at the worst moment

    monkeypatch.setattr(type(store), "delete", delete)
    assert leases.remove_all_unused(store) == []
    assert store.exists(manifest.path)
    assert ids_of(store) == ["d"]
    taken[0].release()
    assert store.list("") == []


def test_a_slow_store_is_asked_about_many_datasets_at_the_same_time(store, make_dataset, monkeypatch):
    names = [f"d{number}" for number in range(8)]
    for name in names:
        make_dataset(dataset_id=name)
        leases.take(store, name, 0.001).withdraw()
        store.publish(layout.lease_path(name, "released"), b'{"time": 0, "keep_seconds": 1}')
    together, exists = threading.Barrier(8), type(store).exists

    def exists_late(store, path):
        together.wait(30)
        return exists(store, path)

    monkeypatch.setattr(type(store), "exists", exists_late)
    assert leases.remove_expired(store) == names
    assert store.list("") == []


def test_datasets_held_by_this_process_are_listed_latest_first_even_if_the_clock_is_set_back(
    store, make_dataset, monkeypatch
):
    clock = itertools.count(2_000_000_000, -10)
    monkeypatch.setattr(leases, "time", SimpleNamespace(time=lambda: next(clock), monotonic=time.monotonic))
    make_dataset(dataset_id="d")
    make_dataset(dataset_id="e")
    held = [leases.take(store, name, 10.0) for name in ("d", "e", "d")]
    write_lease(store, "f")
    assert leases.held_here(store) == ["d", "e"]
    held[2].release()
    assert leases.held_here(store) == ["e", "d"]


def test_removing_a_dataset_forgets_its_fingerprint(store, make_dataset, edit_manifest):
    manifest = make_dataset(dataset_id="d")
    edit_manifest(manifest, lambda content: content.update(fingerprint="abc"))
    store.publish(layout.fingerprint_path("abc", "d"), b"")
    leases.take(store, "d", 0.0).release()
    assert store.list("") == []


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff"])
def test_an_invalid_lease_is_ignored(store, content):
    store.publish(layout.lease_path("d", "x"), content)
    assert leases.held_here(store) == []


def record_of(lease):
    with lease.store.open(lease.path, "rb") as file:
        return json.loads(file.read())


def test_a_hold_is_renewed_until_it_is_released(store, make_dataset):
    make_dataset(dataset_id="d")
    lease = leases.take(store, "d", 7.0)
    first = record_of(lease)
    held = leases.Hold(lease, check_seconds=0.001, renew_seconds=0.0)
    wait_for(lambda: record_of(lease)["taken"] > first["taken"])
    assert {**record_of(lease), "taken": first["taken"]} == first
    held.close()
    held.close()
    assert store.list(layout.LEASES) == ["leases/d/released"]


def test_a_hold_is_renewed_only_once_it_is_old_enough(store, make_dataset, monkeypatch):
    make_dataset(dataset_id="d")
    lease, looks = leases.take(store, "d", 7.0), []
    first, started, offset = record_of(lease)["taken"], time.time(), [1.0]

    def now():
        looks.append(None)
        return started + offset[0]

    monkeypatch.setattr(leases, "time", SimpleNamespace(time=now))
    held = leases.Hold(lease, check_seconds=0.001)
    wait_for(lambda: len(looks) > 10)
    assert record_of(lease)["taken"] == first
    offset[0] = leases.RENEW_SECONDS + 1
    wait_for(lambda: record_of(lease)["taken"] > first + leases.RENEW_SECONDS)
    held.close()


def test_a_failed_renewal_is_logged_and_retried(store, make_dataset, monkeypatch, caplog):
    make_dataset(dataset_id="d")
    lease, original, failures = leases.take(store, "d", 7.0), type(store).open, []
    first = record_of(lease)["taken"]

    def failing(self, path, mode):
        if mode == "wb" and not failures:
            failures.append(path)
            raise StoreError("the network is away")
        return original(self, path, mode)

    monkeypatch.setattr(type(store), "open", failing)
    held = leases.Hold(lease, check_seconds=0.001, renew_seconds=0.0)
    wait_for(lambda: record_of(lease)["taken"] > first)
    held.close()
    assert failures == [lease.path]
    assert ": the network is away" in caplog.text


def test_a_removed_hold_is_not_created_again(store, make_dataset):
    make_dataset(dataset_id="d")
    lease = leases.take(store, "d", 7.0)
    lease.withdraw()
    with pytest.raises(StoreError, match=f"{lease.path} was removed because it had not been renewed for too long"):
        lease.renew()
    assert store.list(layout.LEASES) == []


def test_a_use_of_a_dataset_outlives_the_hold_of_its_preparation(store, make_dataset):
    make_dataset(dataset_id="d")
    lease, use = leases.take(store, "d", 0.0), leases.borrow(store, "d")
    lease.release()
    assert leases.remove_all_unused(store) == leases.remove_expired(store) == []
    assert ids_of(store) == ["d"]
    use.release()
    assert store.list("") == []


def test_a_dataset_is_kept_equally_long_after_another_use(store, make_dataset):
    make_dataset(dataset_id="d")
    release_long_ago(store, "d", 1500.0)
    use = leases.borrow(store, "d")
    assert use.keep_seconds == 1500.0
    use.release()
    assert leases.remove_expired(store) == []
    release_long_ago(store, "d", use.keep_seconds - 600)
    assert leases.remove_expired(store) == ["d"]


def test_the_last_use_keeps_the_record_of_caches(store, make_dataset):
    make_dataset(dataset_id="d")
    lease, use = leases.take(store, "d", 100.0, ("a cache",)), leases.borrow(store, "d")
    lease.release()
    use.release()
    assert leases.remove_expired(store) == []
    assert leases.remove_expired(store, lambda cache: cache != "a cache") == ["d"]


def test_the_uses_of_other_ranks_are_not_read(store, make_dataset, monkeypatch):
    make_dataset(dataset_id="d")
    lease = leases.take(store, "d", 100.0)
    uses = [leases.borrow(store, "d") for _ in range(3)]
    original, read = type(store).open, []

    def open_file(self, path, mode):
        read.append(path)
        return original(self, path, mode)

    monkeypatch.setattr(type(store), "open", open_file)
    assert leases.borrow(store, "d").keep_seconds == 100.0
    assert leases.held_here(store) == ["d"]
    assert read == [lease.path] * 2
    assert len({use.path for use in uses}) == 3


def test_a_dataset_that_was_never_held_stays_after_a_use(store, make_dataset):
    make_dataset(dataset_id="d")
    leases.borrow(store, "d").release()
    assert leases.remove_expired(store) == []
    assert ids_of(store) == ["d"]


def test_a_use_does_not_count_as_opening_the_dataset(store, make_dataset):
    for name in ("d", "e"):
        make_dataset(dataset_id=name)
    leases.take(store, "d", 10.0)
    leases.borrow(store, "e")
    assert leases.held_here(store) == ["d"]


def test_a_hold_lasts_until_the_dataset_is_closed(store, make_dataset):
    make_dataset(dataset_id="d")
    release_long_ago(store, "d", 0.0)
    with hold(store, "d") as data:
        assert (data.dataset_id, data.train_rows) == ("d", 10)
        assert clean(store) == []
    assert store.list("") == []


def test_ranks_receive_a_dataset_without_holding_it(store, make_dataset):
    make_dataset(dataset_id="d")
    release_long_ago(store, "d", 0.0)
    with hold(store, "d") as data:
        sent = pickle.loads(pickle.dumps(data))
        assert (sent.dataset_id, sent.train_rows) == ("d", 10)
        sent.close()
        assert clean(store) == []


def test_holding_a_removed_dataset_leaves_no_files(store):
    with pytest.raises(StoreError, match=r"There is no dataset at .*datasets/d/manifest\.json; its preparation"):
        hold(store, "d")
    assert store.list("") == []


def test_unknown_fields_of_a_lease_are_ignored(store, make_dataset):
    make_dataset(dataset_id="d")
    write_lease(store, "d", colour="blue")
    assert leases.remove_all_unused(store) == []


def test_a_use_of_a_dataset_that_was_never_held_does_not_remove_it(store, make_dataset):
    make_dataset(dataset_id="d")
    leases.borrow(store, "d").release()
    assert clean(store) == []
    assert store.list(layout.LEASES) == []


def test_prepared_rows_opened_by_path_are_held_until_they_are_closed(store, make_dataset):
    manifest = make_dataset(dataset_id="d")
    release_long_ago(store, "d", 10.0)
    files = open_existing(f"{store.root}/{manifest.folder}", feature_cols=["id"], label_cols=["y"])
    assert leases.remove_expired(store) == clean(store) == []
    files.close()
    files.close()
    release_long_ago(store, "d", 10.0)
    assert leases.remove_expired(store) == ["d"]


def test_an_error_about_prepared_rows_ends_the_hold_on_them(store, make_dataset):
    manifest = make_dataset(dataset_id="d")
    release_long_ago(store, "d", 1500.0)
    folder = f"{store.root}/{manifest.folder}"
    with pytest.raises(SchemaError, match="There is no column 'nothing'"):
        open_existing(folder, feature_cols=["nothing"], label_cols=["y"])
    with pytest.raises(DataError, match="num_proc is 11; every rank needs at least one row"):
        open_existing(folder, feature_cols=["id"], label_cols=["y"], num_proc=11)
    assert store.list(layout.LEASES) == ["leases/d/released"]


def test_reading_a_copied_dataset_writes_nothing_beside_it(store, make_dataset, tmp_path):
    manifest = make_dataset(dataset_id="d")
    for copy in (tmp_path / "copy", tmp_path / "other" / manifest.folder):
        shutil.copytree(f"{store.root}/{manifest.folder}", copy)
        files = open_existing(str(copy), feature_cols=["id"], label_cols=["y"])
        assert (files.hold, files.manifest.train.rows) == (None, 10)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["datasets"]


def test_prepared_rows_are_read_even_if_a_hold_cannot_be_written(store, make_dataset, monkeypatch, caplog):
    manifest = make_dataset(dataset_id="d")
    release_long_ago(store, "d", 10.0)

    def refuse(*_):
        raise StoreError("Cannot publish the lease: Read-only file system.")

    monkeypatch.setattr(type(store), "publish", refuse)
    caplog.set_level("INFO", "sparkhvd")
    files = open_existing(f"{store.root}/{manifest.folder}", feature_cols=["id"], label_cols=["y"])
    assert files.hold is None
    assert "are read without protection from removal: Cannot publish the lease: Read-only file system." in caplog.text


@pytest.mark.parametrize("end", ["close", "with", "nothing"])
def test_a_loader_holds_prepared_rows_during_its_lifetime(store, make_dataset, end):
    manifest = make_dataset(dataset_id="d")
    leases.take(store, "d", 1500.0).release()
    loader = torch_loader(f"{store.url}/{manifest.folder}", 4, columns=["id"])
    batches = iter(loader)
    assert len(next(batches)["id"]) == 4
    assert clean(store) == []
    assert sum(len(batch["id"]) for batch in batches) == 6
    if end == "close":
        loader.close()
    elif end == "with":
        with loader:
            pass
    del loader, batches
    gc.collect()
    assert store.list(layout.LEASES) == ["leases/d/released"]
    assert clean(store) == ["d"]


def test_a_finalizer_ends_a_hold_even_from_within_its_thread(store, make_dataset, monkeypatch):
    make_dataset(dataset_id="d")
    owners, watched = [threading.Event()], threading.Event()
    lease = leases.take(store, "d", 10.0)
    monkeypatch.setattr(leases.Lease, "renew", lambda _: watched.is_set() and owners.clear())
    held = leases.Hold(lease, check_seconds=0.001, renew_seconds=0.0)
    weakref.finalize(owners[0], held.close)
    watched.set()
    wait_for(lambda: store.list(layout.LEASES) == ["leases/d/released"])
    held.close()


FORKED = """
import os, sys
from sparkhvd.data import torch_loader

loader = torch_loader(sys.argv[1], 4)
child = os.fork()
if child == 0:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *os.listdir(sys.argv[2]))
"""


def test_a_hold_ends_with_its_interpreter_but_not_with_a_forked_process(store, make_dataset):
    manifest = make_dataset(dataset_id="d")
    leases.take(store, "d", 1500.0).release()
    command = [sys.executable, "-c", FORKED, f"{store.root}/{manifest.folder}", f"{store.root}/leases/d"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    status, *there = done.stdout.split()
    assert status == "7", done.stderr
    assert [name.endswith("-use") for name in sorted(there)] == [True, False]
    assert store.list(layout.LEASES) == ["leases/d/released"]


def test_rows_in_the_callers_own_store_are_held_through_it(store, make_dataset):
    manifest = make_dataset(dataset_id="d")
    release_long_ago(store, "d", 10.0)
    files = open_data(manifest.folder, None, store=store)
    assert files.hold._lease.store is store
    files.close()


def test_a_loader_of_a_manifest_takes_no_lease(store, make_dataset):
    manifest = make_dataset(dataset_id="d")
    leases.take(store, "d", 10.0)
    before = store.list(layout.LEASES)
    assert len(torch_loader(manifest, 4, store=store)) == 3
    assert store.list(layout.LEASES) == before


@pytest.mark.parametrize(
    ("note", "find"),
    [
        (layout.name_path("mine", "d"), lambda store: _find_by_name(store, "mine", 60.0)),
        (layout.fingerprint_path("f", "d"), lambda store: _find_by_fingerprint(store, Fingerprint("f"), 60.0)),
    ],
)
def test_a_lease_ends_if_the_store_fails_before_its_rows_are_reused(store, make_dataset, monkeypatch, note, find):
    make_dataset(dataset_id="d")
    store.publish(note, b"")

    def fail(*_):
        raise StoreError("unavailable")

    monkeypatch.setattr(type(store), "exists", fail)
    with pytest.raises(StoreError, match="unavailable"):
        find(store)
    assert store.list(layout.LEASES) == []
    assert ids_of(store) == ["d"]


@pytest.mark.parametrize("other_rows", [10, 11])
def test_rows_that_another_machine_names_at_the_same_time_are_refused_if_they_differ(
    store, make_dataset, edit_manifest, monkeypatch, other_rows
):
    def prepare(*_, dataset_id, name, **__):
        """Prepare the rows while another machine prepares its own."""
        for number, rows in (("another", other_rows), (dataset_id, 10)):
            manifest = make_dataset(((rows,),), dataset_id=number)
            edit_manifest(manifest, lambda content: content.update(name=name))
        store.publish(layout.name_path(name, "another"), b"")
        return replace(manifest, name=name)

    monkeypatch.setattr(prepared_data, "prepare", prepare)
    selection = Selection(SCHEMA, None)
    write = partial(
        prepared_data._write_new,
        None,
        selection,
        store,
        writing=WriteOptions(1, 3),
        name="mine",
        identify=lambda: None,
        known=None,
        keep_seconds=60.0,
    )
    if other_rows == 10:
        with write() as data:
            assert data.train_rows == 10
        return
    with pytest.raises(
        DataError, match=r"The name 'mine' was given to other rows in .* while these were prepared: their n"
    ):
        write()
    assert ids_of(store) == ["another"]
    assert list(store.list("names")) == [layout.name_path("mine", "another")]


class Delayed:
    """A lease in a Store that does not respond until ``answers`` is set."""

    store = SimpleNamespace(url="s3://bucket/folder")

    def __init__(self):
        self.answers, self.released = threading.Event(), threading.Event()

    def renew(self):
        raise AssertionError("the lease is new")

    def release(self):
        assert self.answers.wait(60)
        self.released.set()


def prepared(hold):
    data = object.__new__(PreparedData)
    data.hold = hold
    return data


@pytest.mark.parametrize(
    "held", [lambda hold: hold, prepared, partial(ExistingFiles, None, None)], ids=["hold", "prepared rows", "files"]
)
def test_an_error_waits_only_briefly_for_a_release_that_the_store_delays(monkeypatch, held):
    monkeypatch.setattr(leases, "_FAILED_SECONDS", 0.01)
    lease = Delayed()
    with pytest.raises(KeyboardInterrupt), held(leases.Hold(lease)):
        raise KeyboardInterrupt
    assert not lease.released.is_set()
    lease.answers.set()
    wait_for(lambda: all(thread.name != "sparkhvd-lease" for thread in threading.enumerate()))
    assert lease.released.is_set()


def refuse_too_few_existing_rows(store, manifest, hold, monkeypatch):
    monkeypatch.setattr(parquet_files, "locate", lambda *_: (store, [""]))
    monkeypatch.setattr(parquet_files, "_open", lambda *_: ExistingFiles(store, manifest, hold))
    open_existing("folder", feature_cols=None, label_cols=[], num_proc=100)


def refuse_other_rows_of_a_name(store, manifest, hold, monkeypatch):
    monkeypatch.setattr(prepared_data, "difference", lambda *_: "their columns")
    data = prepared(hold)
    data.store, data.manifest = store, manifest
    prepared_data._refuse_other_rows(data, Selection(SCHEMA, None), WriteOptions(1, 3), None)


@pytest.mark.parametrize("refuse", [refuse_too_few_existing_rows, refuse_other_rows_of_a_name])
def test_a_refusal_of_rows_waits_only_briefly_for_a_release(store, make_dataset, monkeypatch, refuse):
    monkeypatch.setattr(leases, "_FAILED_SECONDS", 0.01)
    lease = Delayed()
    with pytest.raises(DataError):
        refuse(store, make_dataset(), leases.Hold(lease), monkeypatch)
    assert not lease.released.is_set()
    lease.answers.set()
    wait_for(lambda: all(thread.name != "sparkhvd-lease" for thread in threading.enumerate()))
