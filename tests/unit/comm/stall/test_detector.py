from __future__ import annotations

import logging
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from sparkhvd.comm import session
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousClient, RendezvousServer
from sparkhvd.comm.stall import detector
from sparkhvd.comm.stall.detector import StallDetector
from sparkhvd.comm.stall.report import report
from sparkhvd.comm.stall.snapshot import (
    Condition,
    PendingCollective,
    ProcessIdentity,
    decode_condition,
    decode_identity,
    decode_stacks,
    encode,
    own_identity,
    process_problem,
    stacks,
)
from sparkhvd.comm.stall.stragglers import published_straggler
from sparkhvd.config import Config
from sparkhvd.deadline import Deadline
from sparkhvd.errors import CollectiveError, PeerLostError, SparkHvdError
from sparkhvd.world import World
from tests.ranks import RankGroup
from tests.waiting import wait_for as wait_for_condition

SECONDS = 30.0


@pytest.fixture
def group():  # one group per test: the stall check opens connections to the rendezvous
    with RankGroup(3, stall_check_seconds=0.4) as started:
        yield started


# Functions that the ranks run.


def stay_busy(path: Path) -> None:
    """Keep this thread busy in Python code until the path exists."""
    name, end = str(path), time.monotonic() + SECONDS
    while not os.access(name, os.F_OK) and time.monotonic() < end:  # no frames of Python functions hide this one
        pass


def wait_for(path: Path) -> None:
    """Wait until the path exists, without using the processor."""
    name, end = str(path), time.monotonic() + SECONDS
    while not os.access(name, os.F_OK) and time.monotonic() < end:
        time.sleep(0.01)


def next_report(communicator, before=None):
    deadline = Deadline.after(SECONDS)
    while (stall := communicator.stall_report()) is before:
        deadline.check("a report")
        time.sleep(0.01)
    return stall


def one_rank_is_busy(folder):
    communicator = session.current()
    communicator.note_progress(f"step {communicator.world.rank} of 40")
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logging.getLogger("sparkhvd.comm.stall.detector").addHandler(handler)
    if communicator.world.rank == 1:
        stay_busy(folder / "go on")
        communicator.allreduce(np.ones(3), name="gradient")
        return None, lines
    handle = communicator.allreduce_async(np.ones(3), name="gradient")
    stall = next_report(communicator)
    deadline = Deadline.after(SECONDS)
    while communicator.world.rank == 0 and not lines:
        deadline.check("a line in the log")
    (folder / f"seen by {communicator.world.rank}").touch()
    if communicator.world.rank == 0:
        wait_for(folder / "seen by 2")
        (folder / "go on").touch()
    handle.wait()
    return stall, lines


def one_rank_is_stopped(pids):
    communicator = session.current()
    before = communicator.stall_report()
    communicator.barrier(name="together")
    if communicator.world.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        communicator.barrier(name="wanted")
        return None
    handle = communicator.barrier_async(name="wanted")
    stall = next_report(communicator, before)
    if communicator.world.rank == 0:
        next_report(communicator, stall)  # the other rank has its first report by then
        os.kill(pids[2], signal.SIGCONT)
    handle.wait()
    return stall


def wait_in_vain():
    communicator = session.current()
    if communicator.world.rank == 1:
        with pytest.raises(PeerLostError, match="stalled for more than 1 s"):
            communicator.allreduce(np.ones(1), name="the wrong one")
        return ""
    with pytest.raises(PeerLostError) as caught:
        communicator.allreduce(np.ones(1), name="the right one")
    return str(caught.value)


def wait_for_a_hanging_rank(folder):
    communicator = session.current()
    if communicator.world.rank == 1:
        wait_for(folder / "it ended")
        return None
    with pytest.raises(SparkHvdError, match="gradient"):
        communicator.allreduce(np.ones(1), name="gradient")
    (folder / "it ended").touch()
    context = session.launch_context()
    with RendezvousClient(context.rendezvous, context.token, Deadline.after(SECONDS)) as rendezvous:
        return published_straggler(rendezvous)


def one_rank_makes_no_direct_call(folder):
    communicator = session.current()
    if communicator.world.rank == 1:
        wait_for(folder / "seen by 2")
        communicator.allreduce_now(np.ones(1))
        return None
    reports = []

    def watch():
        reports.append(next_report(communicator))
        (folder / f"seen by {communicator.world.rank}").touch()

    watching = threading.Thread(target=watch)
    watching.start()
    communicator.allreduce_now(np.ones(1))
    watching.join()
    return reports[0]


def one_rank_of_a_set_is_busy(folder):
    communicator = session.current()
    outer = communicator.add_process_set([0, 2])
    if communicator.world.rank == 0:
        wait_for(folder / "go on")
        communicator.allreduce(np.ones(3), name="gradient", process_set=outer)
        joined = communicator.join_async()
        wait_for(folder / "join")
        communicator.allreduce(np.ones(3), name="gradient", process_set=outer)
        joined.wait()
    if communicator.world.rank == 2:
        stalls = []
        for then in ("go on", "join"):
            handle = communicator.allreduce_async(np.ones(3), name="gradient", process_set=outer)
            stalls.append(next_report(communicator, *stalls))
            (folder / then).touch()
            handle.wait()
        communicator.join()
        return stalls
    if communicator.world.rank == 1:
        communicator.join()
    return None


def wait_in_vain_in_a_set(folder):
    communicator = session.current()
    pair = communicator.add_process_set([0, 1])
    if communicator.world.rank == 0:
        with pytest.raises(PeerLostError) as caught:
            communicator.allreduce(np.ones(1), name="in the pair", process_set=pair)
        (folder / "it ended").touch()
    else:
        wait_for(folder / "it ended")
        with pytest.raises(PeerLostError) as caught:
            communicator.barrier(name="among all")
    return str(caught.value)


# The expected reports.


def test_the_report_names_the_tensor_and_the_missing_rank_with_its_activity(group, tmp_path):
    for rank, (stall, lines) in enumerate(group.run(one_rank_is_busy, tmp_path)):
        if rank == 1:
            assert lines == [], "the straggler waits for no other rank"
            continue
        (tensor,) = stall.tensors
        assert tensor.title == "allreduce 'gradient'"
        assert (tensor.waiting, tensor.missing, tensor.silent) == ((0, 2), (1,), ())
        assert tensor.age >= 0.2
        assert "in stay_busy" in stall.conditions[1].stacks["MainThread"]
        assert not any(condition.stacks for other, condition in stall.conditions.items() if other != 1)
        if rank != 0:
            assert lines == [] or 0 not in stall.conditions, "the first rank that waits logs the report"
            continue
        level, text = lines[0]
        assert level == "WARNING"
        assert text.startswith("Stalled: allreduce 'gradient' not done after ")
        assert "not submitted by rank 1, while ranks 0, 2 waited" in text
        assert "is alive and waits for nothing; it has completed" in text
        assert "its progress: step 1 of 40" in text
        assert "while not os.access(name, os.F_OK)" in text
        assert "step 0 of 40" not in text, "waiting ranks need no description"


def test_a_direct_call_that_waits_is_reported_too(group, tmp_path):
    first, second, third = group.run(one_rank_makes_no_direct_call, tmp_path)
    assert second is None
    for stall in (first, third):
        (tensor,) = stall.tensors
        assert (tensor.title, tensor.waiting, tensor.missing) == ("direct allreduce", (0, 2), (1,))
        assert "in wait_for" in stall.conditions[1].stacks["MainThread"]


def test_a_stall_in_a_process_set_is_reported_only_for_its_ranks(group, tmp_path):
    _, _, (stall, while_joined) = group.run(one_rank_of_a_set_is_busy, tmp_path)
    (tensor,) = (one for one in stall.tensors if "gradient" in one.title)
    assert tensor.title == "allreduce 'gradient' of process set 1"
    assert (tensor.waiting, tensor.missing, tensor.silent) == ((2,), (0,), ())
    assert "not submitted by rank 0, while rank 2 waited" in str(stall)
    assert "joined" not in str(stall)
    assert "in wait_for" in stall.conditions[0].stacks["MainThread"]
    why = "rank 0, while rank 2 waited; rank 0 waits in join() of another process set, which has no effect on this one"
    assert why in str(while_joined)


def test_the_report_says_when_the_process_of_a_rank_is_stopped(group):
    first, second, _ = group.run(one_rank_is_stopped, group.pids())
    for stall in (first, second):
        assert stall.silent == {2: "its process is stopped by a signal"}
        assert stall.missing == (2,)
        assert f"rank 2 ({os.uname().nodename}, pid {group.pids()[2]}) does not answer: its process is stopped" in str(
            stall
        )


def test_a_stalled_job_ends_after_the_stall_shutdown_time():
    with RankGroup(2, stall_check_seconds=0.2, stall_shutdown_seconds=1.0) as group:
        message, _ = group.run(wait_in_vain)
        assert "stalled for more than 1 s" in message
        assert "'the right one'" in message
        assert "not submitted by rank " in message


@pytest.mark.parametrize(
    ("limit", "check", "seconds"),
    [
        ("stall_shutdown_seconds", 60.0, 2.0),
        ("collective_timeout", 60.0, 2.0),
        ("collective_timeout", 0.2, 3.0),
        pytest.param("stall_shutdown_seconds", 0.2, 3.0, marks=pytest.mark.soak),
        pytest.param("stall_shutdown_seconds", 60.0, 3.0, marks=pytest.mark.soak),
        pytest.param("collective_timeout", 60.0, 3.0, marks=pytest.mark.soak),
    ],
)
def test_the_straggler_is_published_for_the_supervisors(limit, check, seconds, tmp_path):
    with RankGroup(2, stall_check_seconds=check, **{limit: seconds}) as group:
        absent, _ = group.run(wait_for_a_hanging_rank, tmp_path)
    assert (absent.rank, absent.joined) == (1, True)
    assert absent.why.startswith("allreduce 'gradient' not done after ")
    assert absent.why.endswith(
        f"not submitted by rank 1, while rank 0 waited, until SPARKHVD_{limit.upper()}={seconds:g} ended the job"
    )
    assert "in wait_for" in absent.stack


def test_a_stall_in_a_process_set_ends_the_whole_job(tmp_path):
    with RankGroup(3, stall_check_seconds=0.2, stall_shutdown_seconds=1.0) as group:
        for message in group.run(wait_in_vain_in_a_set, tmp_path):
            assert "stalled for more than 1 s: allreduce 'in the pair' of process set 1" in message


def test_ranks_without_the_check_have_no_thread_for_it():
    with RankGroup(2, stall_check=False) as group:
        assert group.run(thread_names) == [["MainThread"]] * 2


def thread_names():
    return [thread.name for thread in threading.enumerate()]


def test_the_stack_of_a_thread_ends_at_its_current_line():
    release = threading.Event()
    thread = threading.Thread(target=release.wait, args=(SECONDS,), name="waiting")
    thread.start()
    try:
        found = stacks()
    finally:
        release.set()
        thread.join()
    assert next(iter(found)) == "MainThread"
    assert "found = stacks()" in found["MainThread"]
    assert "in wait" in found["waiting"].splitlines()[-2]


def test_a_process_is_identified_by_more_than_its_pid():
    communicator = own_identity()
    assert process_problem(communicator) is None
    assert (
        process_problem(ProcessIdentity(communicator.host, communicator.pid, communicator.namespace, "another start"))
        == "has ended"
    )
    assert (
        process_problem(ProcessIdentity("elsewhere", communicator.pid, communicator.namespace, "another start")) is None
    )


def test_a_process_name_that_ends_within_a_character_is_no_error():
    name = Path("/proc/self/comm")  # of a script with a long name, which the kernel cuts
    before = name.read_bytes()
    name.write_bytes("обучение".encode()[:15])
    try:
        assert process_problem(own_identity()) is None
    finally:
        name.write_bytes(before)


def test_snapshots_of_ranks_survive_serialization_and_invalid_ones_are_refused():
    condition = Condition(
        (PendingCollective("x", 1.5, 4), PendingCollective("y", 1.0)),
        3,
        0.5,
        "step 1",
        {"MainThread": "here"},
        {2: "has ended"},
    )
    assert decode_condition(encode(condition)) == condition
    assert decode_identity(encode(own_identity())) == own_identity()
    for content in (
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"pending": 3}',
        b'{"pending": [["x", 1.0]]}',
        b'{"pending": [], "neighbours": {"a": 1}}',
    ):
        with pytest.raises(CollectiveError, match="cannot be read"):
            decode_condition(content)
        with pytest.raises(CollectiveError, match="cannot be read"):
            decode_identity(content)
    for content in (b"", b"\xff", b"[]"):
        with pytest.raises(CollectiveError, match="cannot be read"):
            decode_stacks(content)


class WaitingEngine:
    """An engine whose only collective waits forever."""

    def pending(self):
        return [("allreduce 'gradient'", 5.0)]

    def counters(self):
        return {"operations": 0}

    def host_ranks(self):
        return [0, 1]


@dataclass
class WaitingChannel:
    engine: WaitingEngine


@pytest.mark.parametrize("size", [10, 200])
def test_a_report_costs_a_rank_a_constant_number_of_requests(size, monkeypatch):
    monkeypatch.setattr(detector, "_ANSWER_SECONDS", 0.1)
    context = LaunchContext(world=World(rank=0, size=size), config=Config(stall_check_seconds=1.0))
    with (
        RendezvousServer(b"secret") as server,
        RendezvousClient([("127.0.0.1", server.port)], b"secret", Deadline.after(SECONDS)) as client,
    ):
        for rank in range(1, size):
            server.set(f"job/stall/identity/{rank}", encode(own_identity()))
            if rank != size // 2:
                server.set(f"job/stall/stacks/0/{rank}", b'{"MainThread": "in main"}')
                server.set(f"job/stall/answer/0/{rank}", encode(Condition()))
        watching = StallDetector({0: WaitingChannel(WaitingEngine())}, {0: tuple(range(size))}, client, context, "job")
        try:
            wait_for_condition(lambda: watching.last_report is not None)
            assert list(watching.last_report.silent) == [size // 2]
            shown = [rank for rank, condition in watching.last_report.conditions.items() if condition.stacks]
            assert shown == [rank for rank in range(1, size) if rank != size // 2][:16]
            # This rank's identity; the question twice; the stacks; the answer; all answers; the missing answers and the
            # two runs of the others; the identities of the neighbors; those of all ranks, with the missing ones. The
            # wait for the next question may have begun.
            assert 13 <= server.requests - len(shown) <= 14
        finally:
            client.close()
            watching.close()


def identity(rank, host="one"):
    return ProcessIdentity(host, 100 + rank, "", "")


def test_silent_ranks_are_judged_by_the_observations_of_others():
    conditions = {0: Condition((PendingCollective("barrier 'b'", 70.0),), neighbours={1: "has ended"})}
    identities = {0: identity(0), 1: identity(1), 2: identity(2), 3: identity(3, "two")}
    stall = report(conditions, identities, {0: tuple(range(5))}, since=30.0)
    assert stall.silent == {
        1: "its process has ended",
        2: "its process is alive but executes code that lets no other thread run",
        3: "no rank of its host two answers either",
        4: "it has not joined the stall check yet",
    }
    assert stall.headline() == "barrier 'b' not done after 70 s: no answer from ranks 1, 2, 3, 4, while rank 0 waited"


def test_a_rank_that_has_joined_the_stalled_set_of_ranks_is_not_missing():
    conditions = {
        0: Condition((PendingCollective("allreduce 'a'", 70.0),)),
        1: Condition((PendingCollective("join 'join()'", 5.0),)),
        2: Condition(),
        3: Condition((PendingCollective("join 'join()'", 5.0, process_set=1),)),
    }
    stall = report(conditions, {}, {0: (0, 1, 2, 3), 1: (1, 3)}, since=30.0)
    assert stall.headline() == (
        "allreduce 'a' not done after 70 s: not submitted by ranks 2, 3, while rank 0 waited; rank 3 waits in join() "
        "of another process set, which has no effect on this one"
    )


def test_stragglers_are_awaited_ranks_that_wait_for_no_other():
    sets = {0: (0, 1, 2)}
    waiting = {
        rank: Condition((PendingCollective(title, 70.0),)) for rank, title in enumerate(("barrier 'a'", "barrier 'b'"))
    }
    assert report(waiting, {}, sets, since=30.0).stragglers == (2,), "it does not even answer"
    assert report({**waiting, 2: Condition()}, {}, sets, since=30.0).stragglers == (2,)
    assert report(waiting, {}, {0: (0, 1)}, since=30.0).stragglers == (), "each waits for the other"


def test_the_longest_wait_is_listed_first_and_short_ones_are_left_out():
    conditions = {
        0: Condition(
            (
                PendingCollective("allreduce 'a'", 61.0),
                PendingCollective("allreduce 'b'", 90.0),
                PendingCollective("allreduce 'c'", 1.0),
            )
        ),
        1: Condition((PendingCollective("allreduce 'b'", 88.0),)),
    }
    stall = report(conditions, {}, {0: (0, 1)}, since=30.0)
    assert [(t.title, t.age, t.missing) for t in stall.tensors] == [
        ("allreduce 'b'", 90.0, ()),
        ("allreduce 'a'", 61.0, (1,)),
    ]
    assert "allreduce 'b': 90 s; all ranks have submitted it, but its data does not arrive" in str(stall)
