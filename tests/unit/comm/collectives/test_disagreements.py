"""Mistakes of users: the error on every rank names the tensor, the ranks and both values, and the job continues."""

from __future__ import annotations

import numpy as np
import pytest

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.errors import ConfigError, MismatchError, NotInitializedError, SparkHvdError
from tests.ranks import RankGroup

ONES = np.ones(4, np.float32)


@pytest.fixture(scope="module", params=["shared memory", "sockets"])
def group(request):
    with RankGroup(3, shared_memory=request.param == "shared memory") as started:
        yield started


# Operations in which rank 1 differs from the others, and the expected message of each.

CASES = {
    "shape": (
        lambda communicator, odd: communicator.allreduce(np.ones(4 + odd, np.float32), name="shape"),
        "allreduce 'shape': ranks disagree about the shape: rank 0 submitted (4,), rank 1 submitted (5,)",
    ),
    "dtype": (
        lambda communicator, odd: communicator.allreduce(ONES.astype("float64" if odd else "float32"), name="dtype"),
        "allreduce 'dtype': ranks disagree about the dtype: rank 0 submitted float32, rank 1 submitted float64",
    ),
    "op": (
        lambda communicator, odd: communicator.allreduce(ONES, ReduceOp.MAX if odd else ReduceOp.SUM, name="op"),
        "allreduce 'op': ranks disagree about the reduce operation: rank 0 submitted sum, rank 1 submitted max",
    ),
    "postscale": (
        lambda communicator, odd: communicator.allreduce(ONES, name="postscale", postscale=0.5 if odd else 0.25),
        "allreduce 'postscale': ranks disagree about the postscale: rank 0 submitted 0.25, rank 1 submitted 0.5",
    ),
    "root": (
        lambda communicator, odd: communicator.broadcast(ONES, 2 if odd else 0, name="root"),
        "broadcast 'root': ranks disagree about the root: rank 0 submitted 0, rank 1 submitted 2",
    ),
    "kind": (
        lambda communicator, odd: (
            communicator.barrier(name="kind") if odd else communicator.allreduce(ONES, name="kind")
        ),
        "'kind': ranks disagree about the operation: rank 0 submitted allreduce, rank 1 submitted barrier",
    ),
    "rows": (
        lambda communicator, odd: communicator.allgather(np.ones((communicator.world.rank, 2 + odd)), name="rows"),
        "the shape after the first dimension: rank 0 submitted (0, 2), rank 1 submitted (1, 3)",
    ),
    "group": (
        lambda communicator, odd: communicator.grouped_allreduce([ONES] * (3 if odd else 2), name="group"),
        "ranks disagree about the number of tensors in the group: rank 0 submitted 2, rank 1 submitted 3",
    ),
}


def disagree(case):
    communicator = session.current()
    call, _ = CASES[case]
    return refusal(lambda: call(communicator, int(communicator.world.rank == 1))), communicator.allreduce(
        ONES, ReduceOp.SUM, name="after"
    ).tolist()


def refusal(call):
    try:
        call()
    except SparkHvdError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("case", CASES)
def test_every_rank_learns_of_a_disagreement_and_the_job_continues(group, case):
    _, text = CASES[case]
    for (kind, message), after in group.run(disagree, case):
        assert kind == MismatchError.__name__
        assert text in message
        assert after == [3.0] * 4


def submit_twice():
    communicator = session.current()
    communicator.barrier(name="together")
    first = communicator.allreduce_async(ONES, name="twice") if communicator.world.rank != 1 else None
    refused = refusal(lambda: communicator.allreduce_async(ONES, name="twice")) if first else None
    communicator.barrier(name="both are submitted")
    (first or communicator.allreduce_async(ONES, name="twice")).wait()
    return refused


def test_a_name_in_flight_is_refused_and_the_first_operation_continues(group):
    for rank, refused in enumerate(group.run(submit_twice)):
        if rank == 1:
            continue
        kind, message = refused
        assert kind == ConfigError.__name__
        assert "allreduce 'twice': an operation with this name is already in flight" in message


def leave_gaps():
    communicator = session.current()
    columns = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    refused = refusal(lambda: communicator.allreduce(np.ones((3, 2), np.float32), out=columns))
    return refused, communicator.allreduce(columns, ReduceOp.SUM, name="columns").tolist()


def test_an_array_with_gaps_is_copied_as_input_and_refused_as_output(group):
    for (kind, message), total in group.run(leave_gaps):
        assert kind == ConfigError.__name__
        assert "The array for the result of shape (3, 2) is not contiguous" in message
        assert total == [[0.0, 6.0], [12.0, 18.0], [24.0, 30.0]]


def write_where_results_cannot_go():
    communicator = session.current()
    fixed = np.ones(2, np.float32)
    fixed.flags.writeable = False
    short, ones = np.ones(1, np.float32), np.ones(2, np.float32)
    refusals = [
        refusal(lambda collective=collective, out=out: collective(ones, out=out))
        for collective in (communicator.allreduce, communicator.broadcast)
        for out in (fixed, short)
    ]
    return refusals, fixed.tolist(), communicator.broadcast(ones * communicator.world.rank, 1, out=ones).tolist()


def test_memory_that_cannot_hold_the_result_is_refused(group):
    for refusals, kept, sent in group.run(write_where_results_cannot_go):
        assert {kind for kind, _ in refusals} == {ConfigError.__name__}
        (_, read_only), (_, of_allreduce), (_, also_read_only), (_, of_broadcast) = refusals
        assert read_only == also_read_only == "The array for the result is read-only; pass a writable one."
        assert of_allreduce.startswith("An allreduce of float32[2] cannot go into float32[1]")
        assert of_broadcast.startswith("A broadcast of float32[2] cannot go into float32[1]")
        assert kept == [1.0, 1.0]
        assert sent == [1.0, 1.0]


def test_collectives_before_init_and_after_shutdown_name_the_next_step():
    with pytest.raises(NotInitializedError, match=r"call hvd\.init\(\)"):
        session.current()
    session.init()
    kept = session.current()
    session.shutdown()
    with pytest.raises(NotInitializedError, match=r"closed; call init\(\) again"):
        kept.allreduce(ONES)
