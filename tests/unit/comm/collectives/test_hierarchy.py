"""Allreduce and allgather on several hosts with shared memory within each host, in real processes."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import PeerLostError
from tests.ranks import RankGroup

HOSTS = ("a", "b", "a", "b", "a")
LENGTHS = (0, 1, 17, 100_003, 700_001)


@pytest.fixture(scope="module")
def group():
    with RankGroup(len(HOSTS), hosts=HOSTS) as started:
        yield started


def rows_of_rank(rank: int) -> np.ndarray:
    """Return 1000 rows per unit of the rank; rank 0 contributes none."""
    return np.full((rank * 1000, 3), rank, np.int16)


# Functions that the ranks run.


def reduce_and_gather():
    communicator = session.current()
    before = communicator.counters()["hierarchical"]
    rank = communicator.world.rank
    sums = [communicator.allreduce(np.arange(length) % 7 + rank, ReduceOp.SUM) for length in LENGTHS]
    means = communicator.allreduce(np.full(1001, rank, np.float32), ReduceOp.AVERAGE)
    rows = communicator.allgather(rows_of_rank(rank))
    return sums, means, rows, communicator.counters()["hierarchical"] - before


def reduce_in_a_set_of_ranks():
    """Use a process set of two hosts, with a single rank on one of them."""
    communicator = session.current()
    chosen = communicator.add_process_set(ProcessSet([0, 2, 3]))
    results = None
    if chosen.included():
        results = (
            communicator.allreduce(np.full(5000, communicator.world.rank), ReduceOp.MAX, process_set=chosen).tolist(),
            communicator.allgather(rows_of_rank(communicator.world.rank), process_set=chosen).shape,
            communicator.counters(chosen)["hierarchical"],
        )
    communicator.remove_process_set(chosen)
    return results


def train_with_fewer_steps_on_one_rank():
    communicator = session.current()
    mean = None
    if communicator.world.rank != 4:
        mean = communicator.allreduce(np.full(20_000, 5.0), name="only four").tolist()
    return mean, communicator.join()


def reduce_without(setting: str):
    context = session.launch_context()
    with Communicator(
        replace(context, config=replace(context.config, **{setting: False})), scope=setting
    ) as communicator:
        before = communicator.counters()["hierarchical"]
        total = communicator.allreduce(np.full(5000, communicator.world.rank), ReduceOp.SUM)
        reduced = communicator.counters()["hierarchical"] - before
        rows = communicator.allgather(rows_of_rank(communicator.world.rank))
        return total.tolist(), rows.shape, reduced, communicator.counters()["hierarchical"] - before - reduced


def lose_rank_1_in_the_middle():
    communicator = session.current()
    array = np.ones(3_000_000, np.float32)
    for _ in range(3):
        communicator.allreduce(array, ReduceOp.SUM, name="whole")
    handle = communicator.allreduce_async(array, ReduceOp.SUM, name="broken")
    if communicator.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for step in range(100):
            handle.wait()
            handle = communicator.allreduce_async(array, ReduceOp.SUM, name=f"broken.{step}")
    except PeerLostError as error:
        return str(error)
    raise AssertionError("nobody noticed")


# The expected results.


def test_all_ranks_get_the_results_of_numpy_through_the_memory_of_each_host(group):
    for sums, means, rows, hierarchical in group.run(reduce_and_gather):
        for length, result in zip(LENGTHS, sums, strict=True):
            np.testing.assert_array_equal(result, sum(np.arange(length) % 7 + rank for rank in range(5)))
        np.testing.assert_array_equal(means, np.full(1001, 2.0, np.float32))
        np.testing.assert_array_equal(rows, np.concatenate([rows_of_rank(rank) for rank in range(5)]))
        assert hierarchical == len(LENGTHS) + 2


def test_a_process_set_of_two_hosts_has_its_own_hierarchy(group):
    results = group.run(reduce_in_a_set_of_ranks)
    assert [results[1], results[4]] == [None, None]
    for index in (0, 2, 3):
        assert results[index] == ([3] * 5000, (5000, 3), 2)


def test_a_rank_that_has_joined_takes_part_without_a_contribution(group):
    results = group.run(train_with_fewer_steps_on_one_rank)
    assert [mean for mean, _ in results] == [[4.0] * 20_000] * 4 + [None]
    assert len({last for _, last in results}) == 1


@pytest.mark.parametrize(
    ("setting", "reduced", "gathered"), [("hierarchical_allreduce", 0, 1), ("hierarchical_allgather", 1, 0)]
)
def test_each_hierarchical_algorithm_can_be_turned_off(group, setting, reduced, gathered):
    for result in group.run(reduce_without, setting):
        assert result == ([10] * 5000, (10_000, 3), reduced, gathered)


def test_a_killed_rank_ends_the_operation_on_every_host():
    with RankGroup(4, hosts=("a", "a", "b", "b")) as group:
        outcomes = group.outcomes(lose_rank_1_in_the_middle)
    assert [outcome.died for outcome in outcomes] == [False, True, False, False]
    for rank in (0, 2, 3):
        assert "allreduce 'broken" in outcomes[rank].value, outcomes[rank]
        assert "lost rank 1: " in outcomes[rank].value
