"""A saved object is replaced as a whole or not at all, even if its writer is killed or the disk is full."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from sparkhvd._util.processes.process_identity import machine_id, process_start
from sparkhvd.errors import StoreError
from sparkhvd.estimators.models import folder_lease, saved_folder
from sparkhvd.store import LocalStore

FILES = ("objects.pkl", "trained.json", "model/weights")
BYTES = 50_000


class Killed(BaseException):
    """Ends the process without any cleanup."""


class Failing:
    """A Store in which one of the modifying operations fails, except those on the files of leases.

    Args:
        store: the Store that executes the operations.
        number: the number of the failing operation, counted from 1.
        fail: called in place of this operation.
        for_good: whether all later operations fail, too.
    """

    def __init__(self, store, number, fail, *, for_good):
        self.store, self.number, self.fail, self.for_good = store, number, fail, for_good
        self.url, self.count = store.url, 0

    def __getattr__(self, name):
        return getattr(self.store, name)

    def _step(self, path):
        if folder_lease.is_lease(path):
            if self.for_good and self.count >= self.number:
                raise StoreError("A killed writer releases nothing.")
            return
        self.count += 1
        if self.count == self.number or (self.for_good and self.count > self.number):
            self.fail()

    @contextmanager
    def open(self, path, mode):
        with self.store.open(path, mode) as file:
            if mode == "wb":
                self._step(path)  # before the content appears
            yield file

    def publish(self, path, content):
        self._step(path)
        self.store.publish(path, content)

    def delete(self, path):
        self._step(path)
        self.store.delete(path)


def writing(text):
    """Return a function that writes an object with ``text`` in each of its files."""

    def write(store, folder):
        for name in FILES:
            with store.open(f"{folder}/{name}", "wb") as file:
                file.write(text.encode() * BYTES)
        return {"class": "a.Thing", "text": text, "sparkhvd": {}}

    return write


def found(store):
    """Return the text of the saved object, and check that all of its files are complete."""

    def load(metadata, folder):
        for name in FILES:
            with store.open(f"{folder}/{name}", "rb") as file:
                assert file.read() == metadata["text"].encode() * BYTES
        return metadata["text"]

    return saved_folder.read(store, "thing", "Thing", load)


def killed():
    raise Killed


def full():
    raise StoreError("Cannot write: No space left on device.") from OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("fail", "for_good"), [(killed, True), (full, False)])
def test_one_whole_object_remains_after_a_failure_at_any_point(store, fail, for_good):
    saved_folder.write_new(store, "thing", writing("0"))
    outcomes, number, ended = [], 0, False
    while not ended:
        before, number = found(store), number + 1
        failing, ended = Failing(store, number, fail, for_good=for_good), True
        try:
            saved_folder.overwrite(failing, "thing", writing(str(number)))
        except (Killed, StoreError):
            ended = False
        ended = ended and failing.count < number
        now = found(store)
        assert now in {before, str(number)}
        outcomes.append(now != before)
    assert set(outcomes) == {False, True}
    assert sorted(store.list("thing")) == sorted(f"thing/{name}" for name in (*FILES, saved_folder.METADATA))
    with store.open(f"thing/{saved_folder.METADATA}", "rb") as file:
        assert json.loads(file.read())["sparkhvd"] == {"format": 1}


def test_a_writer_beside_the_first_writer_of_an_object_or_after_it_changes_nothing(store):
    def refused():
        with pytest.raises(StoreError, match=r"Another writer saves an object to .*/thing\. Choose another path"):
            saved_folder.write_new(store, "thing", writing("2"))

    def write(store, folder):
        metadata = writing("1")(store, folder)
        refused()
        return metadata

    saved_folder.write_new(store, "thing", write)
    refused()
    assert found(store) == "1"
    assert len(store.list("thing")) == len(FILES) + 1


def test_a_new_object_that_cannot_be_written_leaves_its_folder_free(store):
    def write(store, folder):
        writing("0")(store, folder)
        full()

    with pytest.raises(StoreError, match="No space left"):
        saved_folder.write_new(store, "thing", write)
    assert store.list("thing") == []
    saved_folder.write_new(store, "thing", writing("1"))
    assert found(store) == "1"


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_a_writer_that_is_killed_leaves_one_whole_object(store):
    saved_folder.write_new(store, "thing", writing("0"))
    for number in range(1, 100):
        pid = os.fork()
        if pid == 0:
            dying = Failing(store, number, lambda: os.kill(os.getpid(), signal.SIGKILL), for_good=False)
            saved_folder.overwrite(dying, "thing", writing("1"))
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:
            break
        assert found(store) in {"0", "1"}
    assert number > len(FILES)
    assert found(store) == "1"
    assert len(store.list("thing")) == len(FILES) + 1


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_a_full_disk_leaves_the_old_object(store):
    """Limit the size of files as a substitute for a full disk."""
    saved_folder.write_new(store, "thing", writing("0"))
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES // 2, BYTES // 2))
        try:
            saved_folder.overwrite(LocalStore(store.root), "thing", writing("1"))
        except StoreError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert found(store) == "0"
    assert len(store.list("thing")) == len(FILES) + 1


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_metadata_of_spark_are_replaced_with_their_checksum(store):
    store.publish("thing/metadata/part-00000", b"{}\n")
    store.publish("thing/metadata/.part-00000.crc", b"a checksum")
    store.publish("thing/stages/0/metadata/part-00000", b"{}\n")
    saved_folder.overwrite(store, "thing", writing("1"))
    assert found(store) == "1"
    assert len(store.list("thing")) == len(FILES) + 1


@pytest.mark.parametrize("store", ["file"], indirect=True)
@pytest.mark.parametrize("when", range(len(FILES)))
def test_a_reader_beside_a_writer_reads_one_whole_object(store, when):
    saved_folder.write_new(store, "thing", writing("0"))
    writers = [partial(saved_folder.overwrite, store, "thing", writing("1"))]

    def load(metadata, folder):
        contents = []
        for number, name in enumerate(FILES):
            if number == when and writers:
                writers.pop()()
            with store.open(f"{folder}/{name}", "rb") as file:
                contents.append(file.read(1).decode())
        return metadata["text"], contents

    assert saved_folder.read(store, "thing", "Thing", load) == ("1", ["1"] * len(FILES))


WRITERS = """
import json, multiprocessing, sys
from sparkhvd.estimators.models import saved_folder
from sparkhvd.store import Store
from tests.contract.test_saved_folder import writing

url, options, count = json.loads(sys.argv[1])
store = Store.create(url, **options)
if hasattr(store, "_class"):
    store._class()  # imports the Store's client once, before the processes fork

def replace(writer, begin):
    store.list("")
    begin.wait(200)
    for number in range(2):
        saved_folder.overwrite(store, "thing", writing(f"{writer}{number}"))

context = multiprocessing.get_context("fork")
begin = context.Barrier(count)
writers = [context.Process(target=replace, args=(writer, begin)) for writer in range(count)]
for writer in writers:
    writer.start()
for writer in writers:
    writer.join()
sys.exit(any(writer.exitcode for writer in writers))
"""


def test_processes_that_replace_one_object_at_the_same_time_take_turns(store):
    options = {} if store.storage_options is None else {"storage_options": dict(store.storage_options)}
    command = [sys.executable, "-c", WRITERS, json.dumps([store.url, options, 3])]
    writers = subprocess.Popen(command, start_new_session=True)
    try:
        assert writers.wait(timeout=250) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(writers.pid, signal.SIGKILL)
        writers.wait()
    assert found(store) in {f"{writer}1" for writer in range(3)}
    assert sorted(store.list("thing")) == sorted(f"thing/{name}" for name in (*FILES, saved_folder.METADATA))


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_a_writer_whose_lease_was_taken_over_keeps_the_other_object(store):
    saved_folder.write_new(store, "thing", writing("0"))

    def suspended(store, folder):
        metadata = writing("1")(store, folder)
        (lease,) = (path for path in store.list("thing") if folder_lease.is_lease(path))
        store.delete(lease)  # as another writer does when this one appears dead
        saved_folder.overwrite(store, "thing", writing("2"))
        return metadata

    with pytest.raises(StoreError, match=r"thing was taken over by another writer.*Save the object again"):
        saved_folder.overwrite(store, "thing", suspended)
    assert found(store) == "2"
    assert len(store.list("thing")) == len(FILES) + 1


class Interleaved:
    """A Store that calls a function after its first read, and another before its first deletion."""

    def __init__(self, store, after_read, before_deletion):
        self.store, self.after_read, self.before_deletion = store, [after_read], [before_deletion]

    def __getattr__(self, name):
        return getattr(self.store, name)

    @contextmanager
    def open(self, path, mode):
        with self.store.open(path, mode) as file:
            yield file
        if mode == "rb" and self.after_read:
            self.after_read.pop()()

    def delete(self, path):
        if self.before_deletion:
            self.before_deletion.pop()()
        self.store.delete(path)


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_a_writer_that_withdraws_and_announces_itself_again_keeps_its_lease(store):
    lease = folder_lease.FolderLease(store, "thing")
    lease.acquire(waits=True)
    other = folder_lease.FolderLease(Interleaved(store, lease.release, partial(lease.acquire, waits=True)), "thing")
    with pytest.raises(StoreError, match=r"Another writer saves an object to .*/thing\."):
        other.acquire(waits=False)
    lease.check()
    lease.release()
    assert store.list("thing") == []


@pytest.mark.parametrize("store", ["file"], indirect=True)
@pytest.mark.parametrize("machine", ["another", machine_id()], ids=["another machine", "this machine"])
def test_a_writer_is_presumed_dead_once_it_is_silent(store, monkeypatch, machine):
    saved_folder.write_new(store, "thing", writing("0"))
    writer = {"machine": machine, "pid": os.getppid(), "started": process_start(os.getppid())}
    store.publish("thing/-writer-0", json.dumps(writer).encode())
    monkeypatch.setattr(folder_lease, "_WAIT_SECONDS", 0.1)
    with pytest.raises(StoreError, match=r"Another writer saves an object to .*/thing\."):
        saved_folder.overwrite(store, "thing", writing("1"))
    assert found(store) == "0"
    limit = folder_lease.SILENT_SECONDS
    monkeypatch.setattr(folder_lease, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(folder_lease, "_WAIT_SECONDS", 60.0)

    def write(store, folder):
        monkeypatch.setattr(folder_lease, "SILENT_SECONDS", limit)  # for this writer
        return writing("1")(store, folder)

    saved_folder.overwrite(store, "thing", write)
    assert found(store) == "1"
    assert len(store.list("thing")) == len(FILES) + 1
