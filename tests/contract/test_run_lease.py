"""A run has one fit at a time, and only its latest owner can write; on every kind of Store, with real processes."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from unittest import mock

import pytest

from sparkhvd.data.reuse.leases import Hold
from sparkhvd.errors import ParamError, StoreError
from sparkhvd.estimators.runs import run_lease
from sparkhvd.estimators.runs.run_lease import Fence, acquire_lease, claim_fence
from sparkhvd.estimators.training import checkpoint
from sparkhvd.store import layout
from tests.waiting import wait_for

# Takes the run "r", saves a checkpoint, and tries to save another one on request.
HOLDER = """
import pickle, sys
from sparkhvd.data.reuse.leases import Hold
from sparkhvd.errors import StoreError
from sparkhvd.estimators.runs import run_lease
from sparkhvd.estimators.training import checkpoint
run_lease.machine_id = lambda: sys.argv[2]
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
    """Start a process that holds the run on a machine with the id ``machine``."""
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


def latest(store):
    path = checkpoint.latest(store, "r")
    return checkpoint.load(store, path)


def saved(fence, epoch, state):
    checkpoint.save(fence, checkpoint.Checkpoint(epoch, 1, (), state))


@contextmanager
def outdated_check():
    """Let the next check for a higher token pass, as if that token were claimed after it."""
    look, looks = Fence.check, []

    def check(fence):
        looks.append(fence)
        if len(looks) > 1:
            look(fence)

    with mock.patch.object(Fence, "check", check):
        yield
    assert looks


def test_a_second_fit_is_refused_until_the_first_is_killed(store, tmp_path):
    with another_fit(store, tmp_path, run_lease.machine_id()) as process:
        with pytest.raises(ParamError, match=rf"Run 'r' is being trained by another fit \(process {process.pid} on"):
            acquire_lease(store, "r")
        process.kill()
        process.wait(60)
        lease = acquire_lease(store, "r")
        assert latest(store).state == b"of the holder"
        fence = claim_fence(store, "r", lease.holder)
        saved(fence, 1, b"ours")
        assert latest(store).state == b"ours"
        assert len(store.list(layout.checkpoints_folder("r"))) == 1
        lease.release()
        acquire_lease(store, "r").release()


def test_a_fit_on_another_machine_is_taken_over_only_while_it_is_suspended(store, tmp_path):
    with another_fit(store, tmp_path, "elsewhere") as process:
        with pytest.raises(ParamError, match="is being trained by another fit"):
            acquire_lease(store, "r")
        process.send_signal(signal.SIGSTOP)
        lease = acquire_lease(store, "r", silent_seconds=1.0)
        fence = claim_fence(store, "r", lease.holder)
        saved(fence, 1, b"ours")
        process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        message = process.stdout.readline()
        assert message.startswith("FENCED Run 'r' in "), message
        assert "was taken over by another fit" in message
        assert (latest(store).epoch, latest(store).state) == (1, b"ours")
        lease.check()
        lease.release()


def test_a_fit_that_gets_the_run_after_another_waiting_fit_is_not_taken_over(store, tmp_path):
    with another_fit(store, tmp_path, "elsewhere") as process:
        process.kill()
        process.wait(60)
        refuse, waits = run_lease._refuse_active, []

        def wait(*args):
            waits.append(args)
            if len(waits) == 1:
                acquire_lease(store, "r", silent_seconds=0.2).release()
            refuse(*args)

        with mock.patch.object(run_lease, "_refuse_active", wait):
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
    barrier, outcomes = threading.Barrier(4), []

    def begin():
        barrier.wait(30)
        with suppress(ParamError):
            outcomes.append(acquire_lease(store, "r"))

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (lease,) = outcomes
    lease.check()


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_a_writer_suspended_between_check_and_write_changes_nothing(store):
    first = acquire_lease(store, "r")
    old = claim_fence(store, "r", first.holder)
    saved(old, 3, b"first")
    first.release()
    second = acquire_lease(store, "r")
    new = claim_fence(store, "r", second.holder)
    assert latest(store).state == b"first"
    with outdated_check(), pytest.raises(StoreError, match="was taken over"):
        saved(old, 9, b"late")
    with outdated_check():
        checkpoint.save_final(old, checkpoint.Checkpoint(9, 1, (), b"late"))
    assert (latest(store).epoch, checkpoint.kept_epochs(store, "r")) == (3, {3})
    saved(new, 4, b"second")
    with outdated_check(), pytest.raises(StoreError, match="was taken over"):
        saved(old, 10, b"late")
    assert (latest(store).epoch, latest(store).state) == (4, b"second")
    with pytest.raises(StoreError, match="was taken over by another fit"):
        first.check()
    with pytest.raises(StoreError, match="was taken over by another fit"):
        old.check()
    with pytest.raises(StoreError, match="was taken over by another fit"):
        claim_fence(store, "r", first.holder)
    second.release()


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_restarted_ranks_fence_their_predecessors(store):
    lease = acquire_lease(store, "r")
    before = claim_fence(store, "r", lease.holder)
    saved(before, 1, b"before")
    again = claim_fence(store, "r", lease.holder)
    with pytest.raises(StoreError, match="was taken over"):
        saved(before, 2, b"before")
    saved(again, 2, b"again")
    assert latest(store).state == b"again"
    lease.check()
    lease.release()


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_a_crash_between_the_two_files_of_a_claim_loses_nothing(store):
    lease = acquire_lease(store, "r")
    saved(claim_fence(store, "r", lease.holder), 1, b"kept")
    lease.release()
    with (
        mock.patch.object(run_lease, "owned_checkpoints", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        acquire_lease(store, "r")
    assert latest(store).state == b"kept"
    again = acquire_lease(store, "r", silent_seconds=0.2)
    assert latest(store).state == b"kept"
    again.release()


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_leftovers_of_claims_do_not_accumulate(store):
    for _ in range(5):
        lease = acquire_lease(store, "r")
        claim_fence(store, "r", lease.holder)
        lease.release()
    assert len(store.list(layout.holders_folder("r"))) == 3


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_a_run_that_could_not_be_released_is_free_for_the_next_fit_of_the_process(store):
    lease = acquire_lease(store, "r")
    claim_fence(store, "r", lease.holder)
    with (
        mock.patch.object(run_lease.RunLease, "_beat", side_effect=StoreError("No space left on device.")),
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

    honest, last = read(claim), read(beat)
    hold = Hold(lease, check_seconds=0.02, renew_seconds=0.02)
    try:
        write(claim, content)
        with pytest.raises(StoreError, match="does not hold the content that a fit wrote there"):
            lease.check()
        with pytest.raises(StoreError, match="does not hold the content that a fit wrote there"):
            claim_fence(store, "r", lease.holder)
        wait_for(lambda: "does not hold the content that a fit wrote there" in caplog.text)  # the thread meets it, too
        write(claim, honest)
        last = read(beat)
        wait_for(lambda: read(beat) != last)
    finally:
        hold.close()
