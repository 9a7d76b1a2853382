"""One fit at a time holds a run, and only its latest holder can write: tests with real processes and every Store."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from unittest import mock

import pytest

from sparkhvd._util.processes.process_identity import machine_id
from sparkhvd.data.reuse.leases import Hold
from sparkhvd.errors import ParamError, StoreError
from sparkhvd.estimators.runs import run_lease
from sparkhvd.estimators.runs.run_lease import Fence, acquire_lease, claim_fence
from sparkhvd.estimators.training import checkpoint
from sparkhvd.store import layout
from tests.waiting import wait_for

# A fit that holds the run "r": it saves a checkpoint, and on request tries to save another one.
HOLDER = """
import pickle, sys
from sparkhvd._util.processes import process_identity
from sparkhvd.data.reuse.leases import Hold
from sparkhvd.errors import StoreError
from sparkhvd.estimators.runs import run_lease
from sparkhvd.estimators.training import checkpoint
process_identity.machine_id = lambda: sys.argv[2]
with open(sys.argv[1], "rb") as file:
    store = pickle.load(file)
lease = run_lease.acquire_lease(store, "r")
hold = Hold(lease, check_seconds=0.05, renew_seconds=0.05)
fence = run_lease.claim_fence(store, "r", lease.holder)
checkpoint.save(fence, checkpoint.Checkpoint(0, 1, (), b"of the holder"))
print("HOLDS", flush=True)
sys.stdin.readline()
try:
    checkpoint.save(fence, checkpoint.Checkpoint(7, 1, (), b"late"))
except StoreError as error:
    print("FENCED", error, flush=True)
else:
    print("SAVED", flush=True)
hold.close()
"""


@contextmanager
def another_fit(store, folder, machine):
    """Start a fit in another process, which holds the run "r" as if on the machine with the id ``machine``."""
    path = folder / "store.pickle"
    path.write_bytes(pickle.dumps(store))
    command = [sys.executable, "-c", HOLDER, str(path), machine]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "HOLDS\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def latest_checkpoint(store):
    path = checkpoint.latest(store, "r")
    return checkpoint.load(store, path)


def save_checkpoint(fence, epoch, state):
    checkpoint.save(fence, checkpoint.Checkpoint(epoch, 1, (), state))


@contextmanager
def outdated_check():
    """Skip the next check for a higher token, as if that token were claimed between the check and the write."""
    original_check, calls = Fence.check, []

    def check(fence):
        calls.append(fence)
        if len(calls) > 1:
            original_check(fence)

    with mock.patch.object(Fence, "check", check):
        yield
    assert calls


@pytest.mark.parametrize("store", ["file", "hdfs", "s3"], indirect=True)
def test_a_second_fit_is_refused_until_the_first_is_killed(store, tmp_path):
    with another_fit(store, tmp_path, machine_id()) as process:
        with pytest.raises(ParamError, match=rf"Run 'r' is being trained by another fit \(process {process.pid} on"):
            acquire_lease(store, "r")
        process.kill()
        process.wait(60)
        lease = acquire_lease(store, "r")
        assert latest_checkpoint(store).state == b"of the holder"
        fence = claim_fence(store, "r", lease.holder)
        save_checkpoint(fence, 1, b"ours")
        assert latest_checkpoint(store).state == b"ours"
        assert len(store.list(layout.checkpoints_folder("r"))) == 1
        lease.release()
        acquire_lease(store, "r").release()


@pytest.mark.parametrize(("machine", "silent_seconds"), [("elsewhere", 1.0), (machine_id(), 0.0)])
def test_a_run_is_taken_over_only_while_its_fit_is_suspended(store, tmp_path, machine, silent_seconds):
    """A fit whose Store fails does not renew its lease either."""
    with another_fit(store, tmp_path, machine) as process:
        with pytest.raises(ParamError, match="is being trained by another fit"):
            acquire_lease(store, "r")
        process.send_signal(signal.SIGSTOP)
        lease = acquire_lease(store, "r", silent_seconds=silent_seconds)
        fence = claim_fence(store, "r", lease.holder)
        save_checkpoint(fence, 1, b"ours")
        process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        message = process.stdout.readline()
        assert message.startswith("FENCED Run 'r' in "), message
        assert "was taken over by another fit" in message
        assert (latest_checkpoint(store).epoch, latest_checkpoint(store).state) == (1, b"ours")
        lease.check()
        lease.release()


def test_a_fit_that_acquires_the_run_after_another_waiting_fit_keeps_it(store, tmp_path):
    with another_fit(store, tmp_path, "elsewhere") as process:
        process.kill()
        process.wait(60)
        refuse_active, calls = run_lease._refuse_active, []

        def let_another_fit_acquire_first(*args):
            calls.append(args)
            if len(calls) == 1:
                acquire_lease(store, "r", silent_seconds=0.2).release()
            refuse_active(*args)

        with mock.patch.object(run_lease, "_refuse_active", let_another_fit_acquire_first):
            lease = acquire_lease(store, "r", silent_seconds=0.2)
        with pytest.raises(ParamError, match="is being trained by another fit"):
            acquire_lease(store, "r")
        lease.check()
        lease.release()


def test_a_fit_that_fails_before_its_ranks_start_leaves_no_run_unless_an_earlier_fit_trained_it(store):
    acquire_lease(store, "r").release()
    assert store.list(layout.run_folder("r")) == []
    lease = acquire_lease(store, "r")
    fence = claim_fence(store, "r", lease.holder)
    lease.release()
    acquire_lease(store, "r").release()
    with pytest.raises(StoreError, match="was taken over by another fit"):
        fence.check()


def test_exactly_one_of_several_simultaneous_fits_gets_the_run(store):
    barrier, leases = threading.Barrier(4), []

    def acquire():
        barrier.wait(30)
        with suppress(ParamError):
            leases.append(acquire_lease(store, "r"))

    threads = [threading.Thread(target=acquire) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (lease,) = leases
    lease.check()


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_a_writer_suspended_between_check_and_write_changes_nothing(store):
    first_lease = acquire_lease(store, "r")
    old_fence = claim_fence(store, "r", first_lease.holder)
    save_checkpoint(old_fence, 3, b"first")
    first_lease.release()
    second_lease = acquire_lease(store, "r")
    new_fence = claim_fence(store, "r", second_lease.holder)
    assert latest_checkpoint(store).state == b"first"
    with outdated_check(), pytest.raises(StoreError, match="was taken over"):
        save_checkpoint(old_fence, 9, b"late")
    with outdated_check():
        checkpoint.save_final(old_fence, checkpoint.Checkpoint(9, 1, (), b"late"))
    assert (latest_checkpoint(store).epoch, checkpoint.kept_epochs(store, "r")) == (3, {3})
    save_checkpoint(new_fence, 4, b"second")
    with outdated_check(), pytest.raises(StoreError, match="was taken over"):
        save_checkpoint(old_fence, 10, b"late")
    assert (latest_checkpoint(store).epoch, latest_checkpoint(store).state) == (4, b"second")
    with pytest.raises(StoreError, match="was taken over by another fit"):
        first_lease.check()
    with pytest.raises(StoreError, match="was taken over by another fit"):
        old_fence.check()
    with pytest.raises(StoreError, match="was taken over by another fit"):
        claim_fence(store, "r", first_lease.holder)
    second_lease.release()


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_restarted_ranks_fence_their_predecessors(store):
    lease = acquire_lease(store, "r")
    old_fence = claim_fence(store, "r", lease.holder)
    save_checkpoint(old_fence, 1, b"old")
    new_fence = claim_fence(store, "r", lease.holder)
    with pytest.raises(StoreError, match="was taken over"):
        save_checkpoint(old_fence, 2, b"old")
    save_checkpoint(new_fence, 2, b"new")
    assert latest_checkpoint(store).state == b"new"
    lease.check()
    lease.release()


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_a_crash_between_the_two_files_of_a_claim_loses_nothing(store):
    lease = acquire_lease(store, "r")
    save_checkpoint(claim_fence(store, "r", lease.holder), 1, b"kept")
    lease.release()
    with (
        mock.patch.object(run_lease, "owned_checkpoints", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        acquire_lease(store, "r")
    assert latest_checkpoint(store).state == b"kept"
    next_lease = acquire_lease(store, "r", silent_seconds=0.2)
    assert latest_checkpoint(store).state == b"kept"
    next_lease.release()


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_a_fit_does_not_take_its_own_claim_for_another_fit(store):
    publish = type(store).publish
    has_failed = []

    def publish_but_fail_once(self, path, content):
        publish(self, path, content)
        if not has_failed:
            has_failed.append(path)
            raise StoreError("The answer was lost.")

    with mock.patch.object(type(store), "publish", publish_but_fail_once):
        lease = acquire_lease(store, "r")
    lease.check()
    save_checkpoint(claim_fence(store, "r", lease.holder), 1, b"kept")
    assert latest_checkpoint(store).state == b"kept"
    lease.release()


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_leftovers_of_claims_do_not_accumulate(store):
    for _ in range(5):
        lease = acquire_lease(store, "r")
        claim_fence(store, "r", lease.holder)
        lease.release()
    assert len(store.list(layout.holders_folder("r"))) == 3


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_a_run_that_could_not_be_released_is_free_for_the_next_fit_of_the_same_process(store):
    lease = acquire_lease(store, "r")
    claim_fence(store, "r", lease.holder)
    with (
        mock.patch.object(run_lease.RunLease, "_write_beat", side_effect=StoreError("No space left on device.")),
        pytest.raises(StoreError, match="No space left on device"),
    ):
        lease.release()
    acquire_lease(store, "r").release()


@pytest.mark.parametrize("store", ["file"], indirect=True)
@pytest.mark.parametrize("content", [b"<html>Bad Gateway</html>", b"\xff\xfe", b"[]", b'{"other": 1}'])
def test_a_lease_survives_content_that_no_fit_wrote(store, content, caplog):
    lease = acquire_lease(store, "r")
    claim = layout.claim_path("r", lease.token)
    beat = layout.beat_path("r", lease.holder.name)

    def read(path):
        with store.open(path, "rb") as file:
            return file.read()

    def write(path, value):
        with store.open(path, "wb") as file:
            file.write(value)

    claim_content, beat_content = read(claim), read(beat)
    hold = Hold(lease, check_seconds=0.02, renew_seconds=0.02)
    try:
        write(claim, content)
        with pytest.raises(StoreError, match="does not hold the content that a fit wrote there"):
            lease.check()
        with pytest.raises(StoreError, match="does not hold the content that a fit wrote there"):
            claim_fence(store, "r", lease.holder)
        wait_for(lambda: "does not hold the content that a fit wrote there" in caplog.text)  # the thread reads it, too
        write(claim, claim_content)
        beat_content = read(beat)
        wait_for(lambda: read(beat) != beat_content)
    finally:
        hold.close()
