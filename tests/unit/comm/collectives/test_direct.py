"""Calls without negotiation."""

from __future__ import annotations

import traceback

import numpy as np
import pytest

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.errors import ConfigError, MismatchError
from tests.ranks import RankGroup


@pytest.fixture(scope="module")
def pair():
    with RankGroup(2) as started:
        yield started


def reduce_now(dtype, lengths):
    communicator = session.current()
    named = communicator.allreduce_async(np.full(3, communicator.world.rank), ReduceOp.SUM, name="beside")
    results = []
    for length in lengths:
        array = np.full(length, communicator.world.rank + 1, dtype)
        results.append(communicator.allreduce_now(array, ReduceOp.SUM))
        communicator.allreduce_now(array, ReduceOp.MAX, out=array)
        results.append(array)
    return results, named.wait()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64", "float16", "float32", "float64"])
def test_direct_calls_are_matched_by_order_beside_a_named_operation(pair, dtype):
    lengths = (0, 1, 1000, 70001)
    for results, named in pair.run(reduce_now, dtype, lengths):
        for index, length in enumerate(lengths):
            assert results[2 * index].dtype == dtype
            assert len(results[2 * index]) == length
            assert (results[2 * index] == 3).all()
            assert (results[2 * index + 1] == 2).all()
        assert named.tolist() == [1, 1, 1]


def disagree():
    communicator = session.current()
    with pytest.raises(MismatchError) as caught:
        communicator.allreduce_now(np.zeros(3 + communicator.world.rank, np.float32), ReduceOp.SUM)
    assert "CoreError" not in "".join(traceback.format_exception(caught.value)), "our sentence is what is read first"
    return str(caught.value), communicator.allreduce_now(np.ones(2), ReduceOp.SUM).tolist()


def test_a_disagreement_of_direct_calls_reaches_all_ranks_and_the_next_call_works(pair):
    for message, after in pair.run(disagree):
        assert "rank 0 calls sum of 3 x float32" in message
        assert "rank 1 calls sum of 4 x float32" in message
        assert after == [2.0, 2.0]


def test_memory_that_a_direct_call_cannot_use_is_refused(pair):
    for messages in pair.run(refusals):
        assert "contiguous" in messages[0]
        assert "format" in messages[1]
        assert "must have the length and dtype of the array to reduce" in messages[2]
        assert "no average" in messages[3]


def refusals():
    communicator = session.current()
    good = np.zeros(4, np.float32)
    cases = [
        (np.zeros((4, 4), np.float32)[:, 0], ReduceOp.SUM, good),
        (np.zeros(4, np.complex64), ReduceOp.SUM, np.zeros(4, np.complex64)),
        (good, ReduceOp.SUM, np.zeros(5, np.float32)),
        (np.zeros(4, bool), ReduceOp.AVERAGE, np.zeros(4, bool)),
    ]
    messages = []
    for array, op, out in cases:
        with pytest.raises(ConfigError) as caught:
            communicator.allreduce_now(array, op, out=out)
        messages.append(str(caught.value))
    return messages


def test_a_rank_without_shared_memory_negotiates_by_name():
    with Communicator(LaunchContext()) as alone:
        assert alone.allreduce_now(np.arange(3.0)).tolist() == [0, 1, 2]
        assert alone.counters()["operations"] > 0
