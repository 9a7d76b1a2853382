"""Collectives on rows, groups and joins, compared with NumPy."""

from __future__ import annotations

import traceback
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp, buffer_of
from sparkhvd.comm.collectives.options import SubmitOptions
from sparkhvd.comm.collectives.raw import rows_of
from sparkhvd.errors import ConfigError, MismatchError
from tests.ranks import RankGroup

FLOATS = ("float16", "float32", "float64")
INTEGERS = ("uint8", "int8", "uint16", "int16", "int32", "int64")
LINEAR = (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
SHAPES = ((1,), (0, 3), (7,), (5, 3), (1009, 2))
TOLERANCE = {"float16": 4e-3, "float32": 1e-6, "float64": 1e-14}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("one",) * 3, id="one host", marks=pytest.mark.soak),
        pytest.param(("one", "two", "one"), id="two hosts"),
    ],
)
def group(request):
    with RankGroup(3, hosts=request.param) as started:
        yield started


def values_of(dtype: str, shape: tuple[int, ...], rank: int) -> np.ndarray:
    """Return a rank's contribution; small, so that no integer type overflows."""
    draw = np.random.default_rng([rank, *shape])
    if dtype == "bool":
        return draw.integers(0, 2, shape).astype(bool)
    if dtype in FLOATS:
        return draw.normal(size=shape).astype(dtype)
    return draw.integers(0 if dtype.startswith("u") else -3, 4, shape).astype(dtype)


def reduced(dtype: str, shape: tuple[int, ...], op: ReduceOp, ranks: int) -> np.ndarray:
    stacked = np.stack([values_of(dtype, shape, rank) for rank in range(ranks)])
    if dtype == "bool":
        return {"sum": stacked.any, "max": stacked.any, "product": stacked.all, "min": stacked.all}[op](axis=0)
    wide = stacked.astype("float64")
    result = {"sum": wide.sum, "average": wide.mean, "min": wide.min, "max": wide.max, "product": wide.prod}[op](axis=0)
    return (np.trunc(result) if dtype in INTEGERS else result).astype(dtype)


def ops_of(dtype: str) -> list[ReduceOp]:
    return [op for op in LINEAR if dtype != "bool" or op is not ReduceOp.AVERAGE]


# Functions that the ranks run.


def reduce_memory_twice():
    """Reduce groups whose arrays share memory, and one whose arrays are adjacent."""
    communicator = session.current()
    whole = np.arange(12.0)
    for parts in ([whole, whole], [whole[6:], whole[2:8]], [whole[:1]] * 3):
        buffers = [buffer_of(part, "part") for part in parts]
        with pytest.raises(ConfigError, match="Tensors 0 and 1 of the group 'g' share memory, which would be reduced"):
            communicator.reduce_buffers([(part, part) for part in buffers], options=SubmitOptions("g"))
    apart = [buffer_of(part, "part") for part in (whole[6:], whole[3:3], whole[3:3], whole[:6])]
    communicator.reduce_buffers([(part, part) for part in apart]).wait()
    assert whole.tolist() == list(range(12)), "adjacent parts are reduced once"


def scatter_everything(dtype):
    communicator = session.current()
    handles = [
        communicator.reducescatter_async(
            values_of(dtype, shape, communicator.world.rank), op, name=f"{dtype}.{shape}.{op}"
        )
        for shape, op in product(SHAPES, ops_of(dtype))
    ]
    return [handle.wait() for handle in handles]


def scatter_scaled():
    communicator = session.current()
    return communicator.reducescatter(
        np.full(4, communicator.world.rank + 1.0), ReduceOp.SUM, prescale=0.5, postscale=3.0
    ).tolist()


def exchange_rows(dtype):
    """Send (s + r) % 3 rows from rank s to rank r."""
    communicator = session.current()
    splits = [(communicator.world.rank + to) % 3 for to in range(communicator.world.size)]
    array = (
        np.repeat(np.arange(communicator.world.size) + 10 * communicator.world.rank, splits)
        .astype(dtype)
        .reshape(-1, 1)
    )
    return communicator.alltoall(array, splits, name=f"rows.{dtype}")


def exchange_evenly():
    communicator = session.current()
    evenly, rows = communicator.alltoall(np.arange(6) + 10 * communicator.world.rank)
    with pytest.raises(ConfigError, match="cannot be divided evenly among 3 ranks; pass splits"):
        communicator.alltoall(np.arange(4))
    with pytest.raises(ConfigError, match=r"does not add up to the first dimension \(4\)"):
        communicator.alltoall(np.arange(4), [1, 1, 1])
    return evenly.tolist(), rows


def run_groups():
    communicator = session.current()
    arrays = [np.full((size, 2), communicator.world.rank + size, np.float32) for size in (4, 0, 5)]
    summed = communicator.grouped_allreduce(arrays, ReduceOp.SUM, name="sums")
    scattered = communicator.grouped_reducescatter(arrays, ReduceOp.SUM)
    gathered = communicator.grouped_allgather([np.arange(communicator.world.rank), np.array([communicator.world.rank])])
    mixed = communicator.grouped_allreduce([np.ones(2, np.int8), np.ones(3, np.float64)], ReduceOp.SUM, prescale=2.0)
    assert communicator.grouped_allreduce([]) == []
    assert communicator.grouped_allgather([]) == []
    return summed, scattered, gathered, mixed


def disagree_within_a_group():
    communicator = session.current()
    handle = communicator.grouped_allreduce_async(
        [np.ones(2), np.ones(3 + communicator.world.rank // 2)], name="uneven"
    )
    with pytest.raises(MismatchError) as caught:
        handle.wait()
    assert handle.done()
    assert "CoreError" not in "".join(traceback.format_exception(caught.value)), "our sentence is what is read first"
    assert communicator.allreduce(np.ones(1), ReduceOp.SUM).tolist() == [3.0]
    return str(caught.value)


def train_unequally():
    """Train r + 1 steps on rank r; ranks that have finished contribute nothing, but averages still count them."""
    communicator = session.current()
    seen = []
    for step in range(communicator.world.rank + 1):
        mean = communicator.allreduce(np.full(2, 3.0), name=f"step.{step}")
        lowest = communicator.allreduce(np.array([communicator.world.rank]), ReduceOp.MIN, name=f"lowest.{step}")
        rows = communicator.allgather(np.array([communicator.world.rank]), name=f"rows.{step}")
        seen.append((mean.tolist(), lowest.tolist(), rows.tolist()))
    last = communicator.join()
    return seen, last, communicator.allreduce(np.ones(1), ReduceOp.SUM).tolist()


def train_unequally_without_names():
    """Submit operations without names, which are matched by number; ranks with fewer steps have lower numbers."""
    communicator = session.current()
    seen = []
    for _epoch in range(3):
        seen.extend(communicator.allreduce(np.full(2, 3.0)).tolist() for _step in range(communicator.world.rank + 1))
        communicator.join()
        seen.append(communicator.allgather(np.array([communicator.world.rank])).tolist())
    return seen


def sum_adaptively():
    """Reduce two tensors that may be fused: one is equal on all ranks, the other orthogonal."""
    communicator = session.current()
    equal, orthogonal = np.full(4, 2.0, np.float16), np.eye(3, dtype=np.float32)[communicator.world.rank]
    results = communicator.grouped_allreduce(
        [equal, orthogonal, orthogonal], ReduceOp.ADASUM, prescale=2.0, postscale=3.0
    )
    with pytest.raises(ConfigError, match="adasum is for float16"):
        communicator.allreduce(np.ones(2, np.int32), ReduceOp.ADASUM)
    with pytest.raises(ConfigError, match="cannot use op=Adasum, which needs whole tensors; use an allreduce"):
        communicator.reducescatter(np.ones(3), ReduceOp.ADASUM)
    return [result.tolist() for result in results]


# The expected results.


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_a_reducescatter_equals_numpy_for_every_shape_and_operation(group, dtype):
    for rank, results in enumerate(group.run(scatter_everything, dtype)):
        for (shape, op), result in zip(product(SHAPES, ops_of(dtype)), results, strict=True):
            want = np.split(reduced(dtype, shape, op, 3), np.cumsum(rows_of(shape[0], 3))[:-1])[rank]
            tolerance = TOLERANCE.get(dtype, 0)
            assert (result.dtype, result.shape) == (want.dtype, want.shape)
            np.testing.assert_allclose(result, want, rtol=tolerance, atol=tolerance, err_msg=f"{dtype} {shape} {op}")


def test_a_reducescatter_scales_before_and_after(group):
    assert group.run(scatter_scaled) == [[9.0, 9.0], [9.0], [9.0]]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_an_alltoall_returns_rows_and_splits_in_rank_order(group, dtype):
    for rank, (result, rows) in enumerate(group.run(exchange_rows, dtype)):
        assert rows == tuple((sender + rank) % 3 for sender in range(3))
        want = np.repeat(10 * np.arange(3) + rank, rows).astype(dtype).reshape(-1, 1)
        assert result.dtype == want.dtype
        np.testing.assert_array_equal(result, want)


def test_an_alltoall_without_splits_sends_equal_parts(group):
    for rank, (result, rows) in enumerate(group.run(exchange_evenly)):
        assert rows == (2, 2, 2)
        assert result == [10 * sender + 2 * rank + i for sender in range(3) for i in range(2)]


def test_groups_of_arrays_are_returned_in_order(group):
    for rank, (summed, scattered, gathered, mixed) in enumerate(group.run(run_groups)):
        for size, array, part in zip((4, 0, 5), summed, scattered, strict=True):
            np.testing.assert_array_equal(array, np.full((size, 2), 3 * size + 3, np.float32))
            np.testing.assert_array_equal(part, np.full((rows_of(size, 3)[rank], 2), 3 * size + 3, np.float32))
        assert [array.tolist() for array in gathered] == [[0, 0, 1], [0, 1, 2]]
        assert [(array.dtype.name, array.tolist()) for array in mixed] == [("int8", [6, 6]), ("float64", [6.0] * 3)]


def test_a_disagreement_about_one_array_fails_its_group(group):
    for message in group.run(disagree_within_a_group):
        for words in ("uneven", "(3,)", "(4,)", "rank 2"):
            assert words in message


def test_ranks_with_fewer_steps_join_and_the_last_rank_is_returned(group):
    for rank, (seen, last, after) in enumerate(group.run(train_unequally)):
        assert last == 2
        assert after == [3.0]
        assert seen == [([3.0 - step] * 2, [step], list(range(step, 3))) for step in range(rank + 1)]


def test_operations_without_names_match_after_a_join_of_unequal_steps(group):
    for rank, seen in enumerate(group.run(train_unequally_without_names)):
        assert seen == [*[[3.0 - step] * 2 for step in range(rank + 1)], [0, 1, 2]] * 3


def test_adasum_is_the_mean_of_equal_tensors_and_the_sum_of_orthogonal_ones(group):
    for equal, *orthogonal in group.run(sum_adaptively):
        assert equal == [12.0] * 4
        assert orthogonal == [[6.0] * 3] * 2


@given(total=st.integers(0, 10_000), size=st.integers(1, 64))
@settings(max_examples=50, deadline=None)
def test_rows_are_divided_evenly_and_the_first_ranks_get_the_rest(total, size):
    rows = rows_of(total, size)
    assert sum(rows) == total
    assert rows == sorted(rows, reverse=True)
    assert rows[0] - rows[-1] <= 1


def test_a_single_rank_gets_back_its_own_input(alone):
    array = np.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(alone.reducescatter(array, prescale=2.0), 2 * array)
    result, rows = alone.alltoall(array)
    np.testing.assert_array_equal(result, array)
    assert rows == (4,)
    assert alone.join() == 0
    with pytest.raises(ConfigError, match="needs at least one dimension to divide along"):
        alone.reducescatter(np.float32(1))
    with pytest.raises(ConfigError, match="needs at least one dimension to divide along"):
        alone.alltoall(np.float32(1))


def test_a_group_that_would_reduce_memory_twice_in_place_is_refused(group):
    group.run(reduce_memory_twice)


def test_masked_arrays_are_refused(alone):
    values, masked = np.ones(2), np.ma.masked_array(np.ones(2), [False, True])
    for call in (alone.allreduce, alone.allreduce_now, alone.allgather, alone.alltoall, alone.broadcast):
        with pytest.raises(ConfigError, match=r"is a masked array, whose mask would be lost\. Pass filled\(\)"):
            call(masked)
    for call in (alone.allreduce, alone.allreduce_now, alone.broadcast):
        with pytest.raises(ConfigError, match="The array for the result is a masked array"):
            call(values, out=masked)
