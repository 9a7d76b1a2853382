from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from sparkhvd import _core
from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.objects import allgather_object
from sparkhvd.comm.process_sets import ProcessSet, Proposal, agreed_sets
from sparkhvd.deadline import Deadline
from sparkhvd.errors import (
    CollectiveError,
    ConfigError,
    DeadlineExceededError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
)
from tests.ranks import RankGroup

KNOWN = {0: (0, 1, 2, 3)}


@pytest.fixture(scope="module")
def group():
    with RankGroup(4) as started:
        yield started


# Functions that the ranks run.


def reduce_in_two_sets():
    communicator = session.current()
    low, high = communicator.add_process_set([1, 0]), communicator.add_process_set(ProcessSet([2, 3]))
    mine = low if communicator.world.rank < 2 else high
    with pytest.raises(ConfigError, match=rf"Rank {communicator.world.rank} is not in ProcessSet"):
        communicator.allreduce(np.ones(1), process_set=high if mine is low else low)
    facts = (mine.process_set_id, mine.ranks, mine.size(), mine.rank(), low.included(), high.included())
    rank = np.full(3, float(communicator.world.rank))
    results = {
        "sum": communicator.allreduce(rank, ReduceOp.SUM, process_set=mine).tolist(),
        "gather": communicator.allgather(rank[:1], process_set=mine).tolist(),
        "root": communicator.broadcast(rank[:1], mine.ranks[1], process_set=mine).tolist(),
        "scatter": communicator.reducescatter(np.arange(3.0), ReduceOp.SUM, process_set=mine).tolist(),
        "alltoall": communicator.alltoall(rank[:2], process_set=mine)[0].tolist(),
        "all": communicator.allreduce(rank[:1], ReduceOp.SUM, process_set=session.global_process_set).tolist(),
    }
    communicator.barrier(process_set=mine)
    removed = (
        communicator.remove_process_set(low),
        communicator.remove_process_set(high),
        communicator.remove_process_set(low),
    )
    with pytest.raises(NotInitializedError, match="not registered"):
        communicator.allreduce(rank, process_set=mine)
    with pytest.raises(NotInitializedError, match="not registered"):
        mine.size()
    return facts, results, removed


def work_in_overlapping_sets_while_others_rest():
    """Use overlapping sets; rank 3 only takes part in adding them, and no other rank may wait for it."""
    communicator = session.current()
    sets = [communicator.add_process_set(ranks) for ranks in ([0, 1], [1, 2], [0, 2], [0, 1, 2])]
    handles = []
    for turn in range(20):
        for index in range(4) if communicator.world.rank % 2 else reversed(range(4)):
            if sets[index].included():
                value = np.array([float(turn * index)])
                name = f"{turn}.{index}"
                handles.append(
                    (value, sets[index], communicator.allreduce_async(value, name=name, process_set=sets[index]))
                )
    right = all(handle.wait() == value for value, _, handle in handles)
    for one in sets:
        communicator.remove_process_set(one)
    return right, len(handles)


class Unpicklable:
    def __reduce__(self):
        raise TypeError("holds a socket")


def error_in_a_set(kind, act):
    """Return the error of ``act(communicator, set)`` on the set of ranks 1 and 3, which must still work afterwards."""
    communicator = session.current()
    one = communicator.add_process_set([1, 3])
    message = ""
    if one.included():
        with pytest.raises(kind) as caught:
            act(communicator, one)
        message = str(caught.value)
        assert communicator.allreduce(np.ones(1), ReduceOp.SUM, process_set=one).tolist() == [2.0]
    communicator.remove_process_set(one)
    return message


def gather_an_unpicklable_object_in_a_set():
    return error_in_a_set(
        CollectiveError,
        lambda communicator, one: allgather_object(
            communicator, Unpicklable() if communicator.world.rank == 3 else 5, process_set=one
        ),
    )


def disagree_within_a_set():
    return error_in_a_set(
        MismatchError,
        lambda communicator, one: communicator.allreduce(np.ones(communicator.world.rank), name="bad", process_set=one),
    )


def refuse(kind, make):
    with pytest.raises(kind) as caught:
        make(session.current())
    return str(caught.value)


def add_different_sets():
    return refuse(
        MismatchError, lambda communicator: communicator.add_process_set([0, 1 + communicator.world.rank % 2])
    )


def add_all_ranks_again():
    return refuse(ConfigError, lambda communicator: communicator.add_process_set(range(4)))


def remove_different_sets():
    communicator = session.current()
    sets = [communicator.add_process_set([0, 1]), communicator.add_process_set([0, 2])]
    message = refuse(
        MismatchError, lambda communicator: communicator.remove_process_set(sets[communicator.world.rank % 2])
    )
    assert [communicator.remove_process_set(one) for one in sets] == [True, True]
    assert communicator.process_sets() == {0: [0, 1, 2, 3]}
    return message


def remove_a_set_that_is_busy():
    communicator = session.current()
    one = communicator.add_process_set([0, 1])
    handle = (
        communicator.allreduce_async(np.ones(1), name="busy", process_set=one) if communicator.world.rank == 0 else None
    )
    communicator.remove_process_set(one)
    if handle is None:
        return ""
    with pytest.raises(CollectiveError) as caught:
        handle.wait()
    return str(caught.value)


def close_without_time_for_any_engine():
    """Return how many engines of this rank refuse operations afterwards."""
    communicator = session.current()
    engines = [channel.engine for channel in communicator._channels.values()]
    with suppress(DeadlineExceededError):
        communicator.close(timeout=0.0)
    for engine in engines:
        with pytest.raises(_core.CoreError):
            engine.barrier("late")
        engine.shutdown(10.0)
    return len(engines)


def holdings():
    """Return this process's descriptors, threads and mappings of shared memory."""
    mappings = Path("/proc/self/maps").read_text().count("memfd:sparkhvd")
    descriptors, threads = (len(list(Path(f"/proc/self/{folder}").iterdir())) for folder in ("fd", "task"))
    return descriptors, threads, mappings


def use_links(communicator, one):
    """Run collectives that exchange messages within a set; check their results."""
    mine = np.arange(6.0) + communicator.world.rank
    received, _ = communicator.alltoall(mine, process_set=one)
    assert received.tolist() == [value + rank for rank in one.ranks for value in _part_of(one, 6)]
    total = communicator.reducescatter(mine, ReduceOp.SUM, process_set=one)
    assert total.tolist() == [len(one.ranks) * value + sum(one.ranks) for value in _part_of(one, 6)]


def _part_of(one, count):
    length = count // one.size()
    return [float(value) for value in range(one.rank() * length, (one.rank() + 1) * length)]


def add_and_remove_sets(times):
    """Return the holdings before the sets, with one set, and after all sets."""
    communicator = session.current()
    communicator.remove_process_set(communicator.add_process_set([0, 1, 2]))  # starts what stays
    before = holdings()
    during = before
    for _ in range(times):
        one = communicator.add_process_set([0, 1, 2])
        if one.included():
            use_links(communicator, one)
            during = holdings()
        communicator.remove_process_set(one)
    communicator.barrier()
    deadline = Deadline.after(10.0)  # the kernel lists a thread for a moment after it has been joined
    while holdings() != before and not deadline.expired():
        time.sleep(0.01)
    return before, during, holdings()


def die_inside_a_set():
    """Return the seconds in which the other ranks of the set notice, and the error."""
    communicator = session.current()
    one = communicator.add_process_set([1, 2, 3])
    pair = communicator.add_process_set([0, 1])
    if not one.included():
        communicator.allreduce(np.ones(1), process_set=pair)
        return 0.0, ""
    use_links(communicator, one)
    if communicator.world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        communicator.alltoall(np.ones(3 << 16), process_set=one)
    seconds = time.monotonic() - began
    if communicator.world.rank == 1:
        communicator.allreduce(np.ones(1), process_set=pair)  # other sets still work
    return seconds, str(caught.value)


def init_with_sets():
    pairs = [ProcessSet([0, 2]), ProcessSet([1, 3])]
    session.init(process_sets=pairs)
    communicator = session.current()
    mine = pairs[communicator.world.rank % 2]
    total = communicator.allreduce(np.array([communicator.world.rank]), ReduceOp.SUM, process_set=mine).item()
    everybody = session.global_process_set
    return mine.process_set_id, total, everybody.process_set_id, everybody.ranks, everybody.rank()


# The expected results.


def test_disjoint_sets_run_every_collective_independently(group):
    for rank, (facts, results, removed) in enumerate(group.run(reduce_in_two_sets)):
        low = rank < 2
        first = 0 if low else 2
        ranks = [first, first + 1]
        assert facts == (facts[0], ranks, 2, rank - first, low, not low)
        assert results == {
            "sum": [float(sum(ranks))] * 3,
            "gather": [float(first), first + 1.0],
            "root": [first + 1.0],
            "scatter": [0.0, 2.0] if rank == first else [4.0],
            "alltoall": [float(first), first + 1.0],
            "all": [6.0],
        }
        assert removed == (True, True, False)


def test_overlapping_sets_need_neither_a_common_order_nor_other_ranks(group):
    for rank, (right, number) in enumerate(group.run(work_in_overlapping_sets_while_others_rest)):
        assert right
        assert number == (0 if rank == 3 else 60)


def test_an_error_within_a_set_names_it_and_its_ranks(group):
    messages = group.run(disagree_within_a_set)
    assert messages[0] == messages[2] == ""
    for message in (messages[1], messages[3]):
        for words in ("allreduce 'bad'", "process set", "[1, 3]", "(1,)", "(3,)"):
            assert words in message


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (add_different_sets, ("rank 0 added [0, 1]", "rank 1 added [0, 2]")),
        (add_all_ranks_again, ("Process set 0 already has the ranks [0, 1, 2, 3]",)),
        (remove_different_sets, ("must remove the same process set",)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_invalid_sets_are_refused_on_every_rank(group, case, words):
    for message in group.run(case):
        for word in words:
            assert word in message


def test_pending_operations_of_a_removed_set_fail(group):
    message = group.run(remove_a_set_that_is_busy)[0]
    # Either this rank leaves the set first, or it notices that the other one leaves.
    assert "'busy'" in message
    assert "was pending when its communicator was closed" in message or "pending here" in message


@pytest.mark.parametrize("times", [3, pytest.param(100, marks=pytest.mark.soak)])
def test_sets_of_one_host_open_no_descriptor_and_leave_nothing_behind(group, times):
    for rank, (before, during, after) in enumerate(group.run(add_and_remove_sets, times)):
        assert after == before
        assert during[0] == before[0]
        assert during[1] - before[1] == (0 if rank == 3 else 1)


def test_a_rank_that_is_killed_inside_a_set_is_noticed_at_once():
    with RankGroup(4) as group:
        outcomes = group.outcomes(die_inside_a_set)
    assert outcomes[3].died
    assert outcomes[0].value == (0.0, ""), outcomes[0].failure
    for outcome in outcomes[1:3]:
        assert not outcome.failure, outcome.failure
        seconds, message = outcome.value
        assert seconds < 10.0
        assert "process set 1, whose ranks 0..2 are ranks [1, 2, 3] of the job" in message
        assert "rank 2" in message


def test_init_can_add_sets_and_close_ends_all_of_them():
    with RankGroup(4, connect=False) as group:
        outcomes = group.run(init_with_sets)
        assert group.run(close_without_time_for_any_engine) == [2] * 4
    for rank, (number, total, zero, everybody, mine) in enumerate(outcomes):
        assert (number, total) == (1 + rank % 2, 2 if rank % 2 == 0 else 4)
        assert (zero, everybody, mine) == (0, [0, 1, 2, 3], rank)


def test_a_split_creates_one_set_per_color():
    proposals = [
        Proposal((0, 2), split=True),
        Proposal((1,), split=True),
        Proposal((0, 2), split=True),
        Proposal((), True),
    ]
    assert agreed_sets(proposals, KNOWN, 4) == [(0, 2), (1,)]


@pytest.mark.parametrize(
    ("proposals", "message"),
    [
        ([Proposal((0, 9))] * 4, r"\[0, 9\] has ranks outside 0..3"),
        ([Proposal((-1, 0))] * 4, "outside"),
        ([Proposal((0, 1)), Proposal((0, 1), split=True)], "a communicator of"),
        ([Proposal((0, 1), True), Proposal((1,), True)], "must be non-empty and disjoint"),
        ([Proposal((), True)] * 2, "must be non-empty and disjoint"),
    ],
)
def test_impossible_proposals_are_refused(proposals, message):
    with pytest.raises((ConfigError, MismatchError), match=message):
        agreed_sets(proposals, KNOWN, 4)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "needs at least one rank and no duplicates"),
        ([1, np.int64(1)], "needs at least one rank and no duplicates"),
        ([0.5, 1], r"ProcessSet\(\[0.5, 1\]\) is invalid: ranks must be integers"),
    ],
)
def test_a_set_needs_distinct_integers(ranks, message):
    with pytest.raises(ConfigError, match=message):
        ProcessSet(ranks)


def test_an_unregistered_set_has_ranks_but_no_id():
    one = ProcessSet([2, 1])
    assert (one.process_set_id, one.ranks) == (None, [1, 2])
    with pytest.raises(NotInitializedError, match=r"hvd.init\(process_sets="):
        one.included()


def test_ranks_that_cannot_pickle_are_named_by_their_rank_in_the_job(group):
    messages = group.run(gather_an_unpicklable_object_in_a_set)
    assert messages[0] == messages[2] == ""
    assert messages[1] == "Ranks [3] could not pickle the objects to send; see the errors on those ranks."
    assert messages[3] == "A Unpicklable cannot be sent to other ranks: holds a socket"
