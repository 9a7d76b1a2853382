from __future__ import annotations

import threading

import numpy as np
import pytest

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.errors import ConfigError, DeadlineExceededError, MismatchError, NotInitializedError
from sparkhvd.world import World
from tests.ranks import RankGroup

FLOATS = ("float16", "float32", "float64")
INTEGERS = ("uint8", "int8", "uint16", "int16", "int32", "int64")
LINEAR = tuple(op for op in ReduceOp if op is not ReduceOp.ADASUM)
SHAPES = ((), (1,), (0,), (7,), (3, 0, 2), (5, 3), (1000,), (64, 129))


@pytest.fixture(
    scope="module", params=[pytest.param(2, id="2 ranks", marks=pytest.mark.soak), pytest.param(3, id="3 ranks")]
)
def group(request):
    with RankGroup(request.param) as started:
        yield started


def inputs(dtype: str, shape: tuple[int, ...], ranks: int, seed: int) -> list[np.ndarray]:
    """Return the contribution of every rank; small, so that no integer type overflows."""
    draw = np.random.default_rng(seed)
    low = 0 if dtype.startswith("u") else -3
    if dtype == "bool":
        return [draw.integers(0, 2, shape).astype(bool) for _ in range(ranks)]
    if dtype in FLOATS:
        return [np.asarray(draw.normal(size=shape)).astype(dtype) for _ in range(ranks)]
    return [np.asarray(draw.integers(low, 4, shape)).astype(dtype) for _ in range(ranks)]


def expected(values: list[np.ndarray], op: ReduceOp) -> np.ndarray:
    dtype = values[0].dtype
    stacked = np.stack(values)
    if dtype.kind == "b":
        return {"sum": stacked.any, "max": stacked.any, "product": stacked.all, "min": stacked.all}[op](axis=0)
    wide = stacked.astype("float64")
    result = {"sum": wide.sum, "average": wide.mean, "min": wide.min, "max": wide.max, "product": wide.prod}[op](axis=0)
    return (np.trunc(result) if dtype.kind in "iu" else result).astype(dtype)


# Functions that the ranks run.


def move_in_foreign_byte_order():
    communicator = session.current()
    mine = np.arange(6.0).reshape(3, 2).astype(">f8" if communicator.world.rank else "<f8") + communicator.world.rank
    handles = [
        communicator.allreduce_async(mine, ReduceOp.SUM),
        communicator.allgather_async(mine),
        communicator.broadcast_async(mine, 1),
    ]
    handles.append(communicator.reducescatter_async(np.tile(mine, (communicator.world.size, 1)), ReduceOp.SUM))
    grouped = communicator.grouped_allreduce([mine, mine.astype(">i2")], ReduceOp.SUM)
    with pytest.raises(ConfigError, match=r"has dtype >f8, whose byte order is not this machine's"):
        communicator.allreduce(mine, out=np.empty((3, 2), ">f8"))
    return [*(handle.wait() for handle in handles), *grouped]


def reduce_everything(cases):
    communicator = session.current()
    handles = [
        communicator.allreduce_async(values[communicator.world.rank], op, name=name) for name, op, values in cases
    ]
    return [handle.wait() for handle in handles]


def gather_ragged(dtype):
    communicator = session.current()
    mine = np.full((communicator.world.rank * 2, 3), communicator.world.rank).astype(dtype)
    return communicator.allgather(mine, name=f"ragged.{dtype}")


def broadcast_from_each(dtype):
    communicator = session.current()
    mine = np.full((2, 3), communicator.world.rank + 1).astype(dtype)
    received = [communicator.broadcast(mine, root) for root in range(communicator.world.size)]
    in_place = mine.copy()
    communicator.broadcast(in_place, communicator.world.size - 1, out=in_place)
    return received, in_place, mine


def reduce_in_place_and_scaled():
    communicator = session.current()
    mine = np.arange(6.0, dtype=np.float32) * (communicator.world.rank + 1)
    result = communicator.allreduce(mine, ReduceOp.SUM, prescale=0.5, postscale=3.0, out=mine)
    return result is mine, mine


def submit_unnamed_in_threads():
    """Submit unnamed operations in the same order on all ranks, and wait for them in threads, in any order."""
    communicator = session.current()
    handles = [communicator.allreduce_async(np.full(10, float(i)), ReduceOp.SUM) for i in range(50)]
    results = {}
    threads = [
        threading.Thread(target=lambda i=i: results.__setitem__(i, handles[i].wait())) for i in reversed(range(50))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [float(results[i][0]) for i in range(50)]


def submit_in_opposite_orders():
    communicator = session.current()
    names = [f"crossed.{i}" for i in range(40)]
    order = names if communicator.world.rank % 2 == 0 else names[::-1]
    handles = {name: communicator.allreduce_async(np.array([float(name.split(".")[1])]), name=name) for name in order}
    return [handles[name].wait().item() for name in names]


def error_of(kind, make):
    """Return the message of the error that every rank must raise."""
    communicator = session.current()
    with pytest.raises(kind) as caught:
        make(communicator)
    after = communicator.allreduce(np.ones(3, np.float32), ReduceOp.SUM)
    assert after.tolist() == [communicator.world.size] * 3, "the communicator must work after a refused operation"
    return str(caught.value)


def disagree_on_shape():
    return error_of(
        MismatchError,
        lambda communicator: communicator.allreduce(np.ones(4 + communicator.world.rank), name="bad shape"),
    )


def disagree_on_dtype():
    return error_of(
        MismatchError,
        lambda communicator: communicator.allreduce(
            np.ones(4, [np.float32, np.float64][communicator.world.rank % 2]), name="bad dtype"
        ),
    )


def disagree_on_operation():
    return error_of(
        MismatchError,
        lambda communicator: communicator.allreduce(
            np.ones(4), [ReduceOp.SUM, ReduceOp.MAX][communicator.world.rank % 2], name="bad operation"
        ),
    )


def disagree_on_root():
    return error_of(
        MismatchError,
        lambda communicator: communicator.broadcast(np.ones(4), communicator.world.rank % 2, name="bad root"),
    )


def disagree_on_kind():
    def make(communicator):
        return (
            communicator.barrier(name="bad kind")
            if communicator.world.rank == 0
            else communicator.allreduce(np.ones(1), name="bad kind")
        )

    return error_of(MismatchError, make)


def disagree_on_row_shape():
    return error_of(
        MismatchError,
        lambda communicator: communicator.allgather(np.ones((2, 3 + communicator.world.rank)), name="bad rows"),
    )


def wait_too_short():
    communicator = session.current()
    ones = np.ones(2)
    if communicator.world.rank == 0:
        handle = communicator.allreduce_async(ones, ReduceOp.SUM, name="late")
        with pytest.raises(DeadlineExceededError, match="late"):
            handle.wait(0.05)
        assert not handle.done()
    communicator.barrier()
    if communicator.world.rank != 0:
        handle = communicator.allreduce_async(ones, ReduceOp.SUM, name="late")
    return handle.wait().tolist(), handle.wait().tolist(), handle.done()


# The expected results.


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_an_allreduce_equals_numpy_for_every_shape_and_operation(group, dtype):
    cases = [
        (f"{dtype}.{op}.{shape}", op, inputs(dtype, shape, group.size, seed))
        for seed, (op, shape) in enumerate((op, shape) for op in LINEAR for shape in SHAPES)
    ]
    tolerance = {"float16": 4e-3, "float32": 1e-6, "float64": 1e-14}.get(dtype, 0)
    for results in group.run(reduce_everything, cases):
        for (name, op, values), result in zip(cases, results, strict=True):
            want = expected(values, op)
            assert result.dtype == want.dtype
            assert result.shape == want.shape
            np.testing.assert_allclose(result, want, rtol=tolerance, atol=tolerance, err_msg=name)


def test_an_allreduce_of_booleans_is_or_and_and(group):
    cases = [
        (f"bool.{op}.{shape}", op, inputs("bool", shape, group.size, seed))
        for seed, (op, shape) in enumerate((op, shape) for op in ("sum", "product", "min", "max") for shape in SHAPES)
    ]
    for results in group.run(reduce_everything, cases):
        for (name, op, values), result in zip(cases, results, strict=True):
            np.testing.assert_array_equal(result, expected(values, op), err_msg=name)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_an_allgather_joins_different_numbers_of_rows_in_rank_order(group, dtype):
    want = np.concatenate([np.full((rank * 2, 3), rank).astype(dtype) for rank in range(group.size)])
    for result in group.run(gather_ragged, dtype):
        assert result.dtype == want.dtype
        np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_a_broadcast_sends_the_array_of_any_root(group, dtype):
    for received, in_place, mine in group.run(broadcast_from_each, dtype):
        for root, result in enumerate(received):
            np.testing.assert_array_equal(result, np.full((2, 3), root + 1).astype(dtype))
        np.testing.assert_array_equal(in_place, np.full((2, 3), group.size).astype(dtype))
        assert mine.shape == (2, 3)


def test_scales_apply_and_a_result_can_go_into_its_input(group):
    want = np.arange(6.0, dtype=np.float32) * sum(range(1, group.size + 1)) * 1.5
    for same, result in group.run(reduce_in_place_and_scaled):
        assert same
        np.testing.assert_allclose(result, want, rtol=1e-6)


def test_arrays_in_foreign_byte_order_have_their_values(group):
    ranks = group.size
    arrays = [np.arange(6.0).reshape(3, 2) + rank for rank in range(ranks)]
    for total, gathered, sent, own_rows, first, second in group.run(move_in_foreign_byte_order):
        assert np.array_equal(total, sum(arrays))
        assert np.array_equal(gathered, np.concatenate(arrays))
        assert np.array_equal(sent, arrays[1])
        assert np.array_equal(own_rows, sum(arrays))
        assert np.array_equal(first, sum(arrays))
        assert np.array_equal(second, sum(arrays))
        assert second.dtype == np.int16


def test_operations_without_names_are_matched_by_order(group):
    for results in group.run(submit_unnamed_in_threads):
        assert results == [float(i * group.size) for i in range(50)]


def test_named_operations_are_matched_in_any_order(group):
    for results in group.run(submit_in_opposite_orders):
        assert results == [float(i) for i in range(40)]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (disagree_on_shape, ("bad shape", "4", "5")),
        (disagree_on_dtype, ("bad dtype", "float32", "float64")),
        (disagree_on_operation, ("bad operation", "sum", "max")),
        (disagree_on_root, ("bad root", "0", "1")),
        (disagree_on_kind, ("bad kind", "barrier", "allreduce")),
        (disagree_on_row_shape, ("bad rows", "3", "4")),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_disagreement_is_one_error_with_both_values_on_every_rank(group, case, words):
    for message in group.run(case):
        for word in words:
            assert word in message


def test_a_wait_ends_at_its_deadline_and_the_operation_continues(group):
    for first, again, done in group.run(wait_too_short):
        assert first == again == [float(group.size)] * 2
        assert done


def seconds_waited():
    """Return this rank's waiting time before a blocking operation, after it, and after a second wait for another."""
    communicator = session.current()
    waits = communicator.channel().waits
    before = waits.seconds
    communicator.allreduce(np.ones(3), ReduceOp.SUM)
    blocking = waits.seconds
    handle = communicator.allreduce_async(np.ones(3), ReduceOp.SUM)
    handle.wait()
    first = waits.seconds
    handle.wait()
    return before, blocking, first, waits.seconds


def test_waiting_times_add_up_but_not_for_results_that_are_there(group):
    for before, blocking, first, second in group.run(seconds_waited):
        assert before < blocking <= first == second


def collectives_alone():
    """Return the errors of collectives while one rank is alone, and of those in another thread and afterwards."""
    communicator, errors = session.current(), []
    if communicator.world.rank == 0:
        with communicator.alone("a checkpoint is saved"):
            for call in (communicator.barrier, lambda: communicator.allreduce(np.ones(3)), communicator.channel):
                with pytest.raises(ConfigError) as caught:
                    call()
                errors.append(str(caught.value))
            other_thread = threading.Thread(target=communicator.channel)
            other_thread.start()
            other_thread.join()
    communicator.barrier()
    return errors


def test_a_rank_that_is_alone_is_refused_collectives(group, alone):
    first, *others = group.run(collectives_alone)
    assert others == [[]] * len(others)
    assert len(set(first)) == 1
    assert first[0].startswith("A collective was called while a checkpoint is saved on rank 0 only, so it would wait")
    with alone.alone("a checkpoint is saved"):
        alone.barrier()


def test_a_single_rank_gets_back_its_own_input(alone):
    array = np.arange(12.0).reshape(3, 4)
    for op in ReduceOp:
        np.testing.assert_array_equal(alone.allreduce(array, op), array)
    np.testing.assert_array_equal(alone.allreduce(array, prescale=2.0, postscale=0.25), array / 2)
    np.testing.assert_array_equal(alone.allgather(array), array)
    np.testing.assert_array_equal(alone.broadcast(array), array)
    alone.barrier()
    assert alone.world == World()
    assert alone.homogeneous
    assert alone.counters()["operations"] >= 7


def test_arrays_with_strides_are_copied_unless_they_receive_the_result(alone):
    array = np.arange(12.0).reshape(3, 4).T
    np.testing.assert_array_equal(alone.allreduce(array), array)
    with pytest.raises(ConfigError, match=r"array for the result of shape \(4, 3\) is not contiguous"):
        alone.allreduce(np.ascontiguousarray(array), out=array)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c: c.allreduce(np.ones(2, np.complex64)),
            "array to reduce has dtype complex64; collectives take bfloat16",
        ),
        (lambda c: c.allreduce(np.array(["a"])), "has dtype <U1"),
        (lambda c: c.allreduce(np.ones(2), out=np.ones(3)), r"float64\[2\] cannot go into float64\[3\]"),
        (lambda c: c.allreduce(np.ones(2), "median"), "op must be Average, Sum, .* got 'median'"),
        (lambda c: c.allgather(np.float32(1)), "needs at least one dimension"),
        (lambda c: c.broadcast(np.ones(2), "0"), r"The root rank must be 0, the only rank; got '0'"),
        (lambda c: c.broadcast(np.ones(2), 3), r"The root rank must be 0, the only rank; got 3"),
    ],
)
def test_invalid_calls_are_refused_before_submission(alone, call, message):
    with pytest.raises(ValueError, match=message):
        call(alone)


def test_a_name_cannot_be_in_flight_twice(group):
    for message in group.run(submit_a_name_twice):
        assert "twice" in message


def submit_a_name_twice():
    communicator = session.current()
    communicator.barrier()
    if communicator.world.rank == 0:
        first = communicator.allreduce_async(np.ones(2), name="twice")
        with pytest.raises(ConfigError) as caught:
            communicator.allreduce_async(np.ones(2), name="twice")
    communicator.barrier()
    if communicator.world.rank != 0:
        first = communicator.allreduce_async(np.ones(2), name="twice")
    first.wait()
    return str(caught.value) if communicator.world.rank == 0 else "twice"


def test_a_closed_communicator_raises_a_clear_error():
    communicator = Communicator(LaunchContext())
    communicator.close()
    communicator.close()
    with pytest.raises(NotInitializedError, match=r"closed; call init\(\) again"):
        communicator.allreduce(np.ones(2))


def test_more_than_one_rank_needs_a_rendezvous():
    with pytest.raises(ConfigError, match="Rank 1 of 2 has no rendezvous address"):
        Communicator(LaunchContext(world=World(rank=1, size=2)))
