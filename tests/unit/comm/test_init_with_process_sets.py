"""Calls of ``init(process_sets=[...])`` that fail on real ranks, and the calls after them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError, MismatchError, PeerLostError
from tests.ranks import RankGroup


@pytest.fixture(scope="module", params=[(2, True), (3, True), (3, False)], ids=["two", "three", "three-tcp"])
def group(request):
    size, shared_memory = request.param
    with RankGroup(
        size, connect=False, shared_memory=shared_memory, start_timeout=30.0, collective_timeout=30.0
    ) as started:
        yield started


@pytest.fixture(params=[3, pytest.param(12, marks=pytest.mark.soak)])
def rounds(request):
    return request.param


def init_after_a_refusal(refused, kind, rounds):
    """Return the messages of the refused calls; after each, call ``init`` twice with the same valid sets."""
    messages = []
    for turn in range(rounds):
        rank = session.launch_context().world.rank
        time.sleep(0.02 * ((rank + turn) % 3))  # each rank reaches init() first in some round
        sets = [ProcessSet(ranks) for ranks in refused(rank, session.launch_context().world.size)]
        with pytest.raises(kind) as caught:
            session.init(process_sets=sets)
        messages.append(str(caught.value))
        assert [one.process_set_id for one in sets] == [None] * len(sets)
        assert not session.is_initialized()
        last = session.launch_context().world.size - 1
        valid = [ProcessSet([0]), ProcessSet([last])]
        for _ in range(2):
            session.init(process_sets=valid)
            communicator = session.current()
            assert [one.process_set_id for one in valid] == [1, 2]
            if rank == last:
                assert communicator.allreduce(np.ones(1), ReduceOp.SUM, process_set=valid[1]).item() == 1
            assert communicator.allreduce(np.ones(1), ReduceOp.SUM).item() == last + 1
            session.shutdown()
            assert [one.process_set_id for one in valid] == [None, None]
    return messages


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda rank, size: [[0], [0]], "process_sets[1] has the ranks [0], as does process_sets[0]"),
        (lambda rank, size: [[0], [size - 1], [0]], "process_sets[2] has the ranks [0], as does process_sets[0]"),
        (lambda rank, size: [[0], range(size)], "process_sets[1] has all ranks of the job"),
        (lambda rank, size: [[0], [1, size]], "has ranks outside 0.."),
        (lambda rank, size: [[-1]], "has ranks outside 0.."),
    ],
    ids=["twice", "apart", "all ranks", "outside", "negative"],
)
def test_every_rank_refuses_impossible_sets_equally_and_the_next_init_succeeds(group, refused, message, rounds):
    messages = group.run(init_after_a_refusal, refused, ConfigError, rounds)
    assert {text for of_rank in messages for text in of_rank} == {messages[0][0]}
    assert message in messages[0][0]


def test_every_rank_refuses_different_sets_and_the_next_init_succeeds(group, rounds):
    messages = group.run(init_after_a_refusal, lambda rank, size: [[min(rank, 1)]], MismatchError, rounds)
    expected = "All ranks must add the same process set: rank 0 added [0], rank 1 added [1]."
    assert {text for of_rank in messages for text in of_rank} == {expected}


def lose_a_rank_between_the_sets(rounds):
    context = session.launch_context()
    last = context.world.size - 1
    connect = Communicator._connect_set

    def fail_once(self, registration):
        Communicator._connect_set = connect
        session._publish(context, f"init-{session._session.inits[()] + 2}/begun")
        raise PeerLostError("the link broke")

    results = []
    for _ in range(rounds):
        sets = [ProcessSet([0]), ProcessSet([last])]
        if context.world.rank == 0:
            Communicator._connect_set = fail_once
        session.init(process_sets=sets)
        communicator = session.current()
        results.append(
            (
                communicator.process_sets(),
                communicator.allreduce(np.ones(1), ReduceOp.SUM).item(),
                [one.ranks for one in sets],
            )
        )
        session.shutdown()
    return results


def test_an_init_that_retries_after_the_loss_of_a_rank_registers_its_sets(group, rounds):
    last = group.size - 1
    expected = ({0: [*range(group.size)], 1: [0], 2: [last]}, group.size, [[0], [last]])
    assert group.run(lose_a_rank_between_the_sets, rounds) == [[expected] * rounds] * group.size


def shut_down_and_init_again():
    session.init()
    added = session.add_process_set(iter([0]))
    removed = session.add_process_set([1])
    session.remove_process_set(removed)
    before = added.process_set_id, removed.process_set_id
    session.shutdown()
    after = added.process_set_id, removed.process_set_id
    session.init(process_sets=[removed, added])
    again = removed.process_set_id, added.process_set_id
    session.shutdown()
    return before, after, again


def test_shutdown_unregisters_sets_that_were_added(group):
    assert group.run(shut_down_and_init_again) == [((1, None), (None, None), (1, 2))] * group.size


def init_with_a_subset_of_the_ranks():
    rank = session.launch_context().world.rank
    if rank > 1:
        return ""
    with pytest.raises(ConfigError) as caught:
        session.init([1, 0], process_sets=[[0, 1]])
    session.init([1, 0], process_sets=[[0]])
    session.shutdown()
    return str(caught.value)


def test_sets_of_a_job_with_a_subset_of_the_ranks_use_the_ranks_of_that_job(group):
    for message in group.run(init_with_a_subset_of_the_ranks)[:2]:
        assert message == ("process_sets[0] has all ranks of the job, [0, 1]; use hvd.global_process_set instead.")


def init_twice():
    first, same, new = ProcessSet([0]), ProcessSet([0]), ProcessSet([1])
    session.init(process_sets=[first])
    session.init()
    session.init(process_sets="Dynamic")
    session.init(process_sets=[first, [0]])
    with pytest.raises(ConfigError) as caught:
        session.init(process_sets=[same, new])
    assert same.process_set_id is None, "all or none"
    with pytest.raises(ConfigError, match=r"cannot register new process sets, here ProcessSet\(id=None, ranks=\[0, 1"):
        session.init(process_sets=[range(session.size())])
    session.init(process_sets=[same])
    ids = first.process_set_id, same.process_set_id, new.process_set_id
    if same.included():
        assert session.current().allreduce(np.ones(1), process_set=same).item() == 1
    session.remove_process_set(first)
    removed = first.process_set_id, same.process_set_id
    session.shutdown()
    return str(caught.value), ids, removed


def test_a_second_init_finds_existing_sets_and_refuses_new_ones(group):
    for message, ids, removed in group.run(init_twice):
        assert message == (
            "A second init() cannot register new process sets, here ProcessSet(id=None, ranks=[1]). Call "
            "hvd.add_process_set() on all ranks, or hvd.shutdown() before hvd.init()."
        )
        assert ids == (1, 1, None)
        assert removed == (None, None)


@pytest.mark.parametrize("ranks", [[], [0, 0]])
def test_raw_ranks_are_checked_before_connecting(ranks):
    with pytest.raises(ConfigError, match="needs at least one rank and no duplicates"):
        session.init(process_sets=[ranks])
    assert not session.is_initialized()
