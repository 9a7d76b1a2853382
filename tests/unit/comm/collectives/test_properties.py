"""Reductions of random dtypes, shapes, operations and scales, compared with NumPy."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from tests.ranks import RankGroup

RANKS = 3
FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "int32", "int64", *FLOATS)
NUMPY = {name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in DTYPES}
LINEAR = (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
SHAPES = st.lists(st.integers(0, 12), max_size=3) | st.sampled_from([[1009], [20011], [64, 129]])
SCALES = st.sampled_from([1.0, 0.5, -2.0])


@pytest.fixture(scope="module", params=[("one",) * RANKS, ("one", "two", "one")], ids=["one host", "two hosts"])
def group(request):
    with RankGroup(RANKS, hosts=request.param) as started:
        yield started


def contributions(dtype, shape, seed):
    """Return the contributions of all ranks: integers so small that every sum and product is exact."""
    draw = np.random.default_rng(seed)
    low, high = (0, 2) if dtype == "bool" else (0, 4) if dtype.startswith("u") else (-3, 4)
    return [draw.integers(low, high, shape).astype(NUMPY[dtype]) for _ in range(RANKS)]


def reduce_drawn(dtype, shape, seed, op, scales):
    communicator = session.current()
    mine = contributions(dtype, shape, seed)[communicator.world.rank]
    return communicator.allreduce(mine, op, prescale=scales[0], postscale=scales[1])


def scatter_drawn(dtype, shape, seed, op):
    communicator = session.current()
    return communicator.reducescatter(contributions(dtype, shape, seed)[communicator.world.rank], op)


def reduced(dtype, shape, seed, op, scales=(1.0, 1.0)):
    """Reduce in float64, where all results but averages are exact."""
    stacked = np.stack(contributions(dtype, shape, seed)).astype(np.float64)
    if dtype == "bool":
        return stacked.max(axis=0) if op in {ReduceOp.SUM, ReduceOp.MAX} else stacked.min(axis=0)
    stacked *= scales[0]
    combine = {"sum": stacked.sum, "average": stacked.mean, "min": stacked.min, "max": stacked.max}
    total = combine.get(str(op), stacked.prod)(axis=0)
    return total * scales[1] if dtype in FLOATS else np.trunc(total)


def assert_close(got, want, dtype, op):
    assert got.dtype == NUMPY[dtype]
    assert got.shape == want.shape
    # Only the average of three numbers needs rounding.
    allowed = float(ml_dtypes.finfo(got.dtype).eps) if dtype in FLOATS and op is ReduceOp.AVERAGE else 0.0
    assert np.all(np.abs(got.astype(np.float64) - want) <= allowed * np.abs(want))


def ops_of(dtype):
    return [op for op in LINEAR if dtype != "bool" or op is not ReduceOp.AVERAGE]


@settings(max_examples=60, deadline=None)
@given(drawn=st.data())
def test_an_allreduce_equals_numpys_reduction(group, drawn):
    dtype = drawn.draw(st.sampled_from(DTYPES))
    op = drawn.draw(st.sampled_from(ops_of(dtype)))
    shape, seed = drawn.draw(SHAPES), drawn.draw(st.integers(0, 1000))
    scales = drawn.draw(st.tuples(SCALES, SCALES)) if dtype in FLOATS else (1.0, 1.0)
    want = reduced(dtype, shape, seed, op, scales)
    for got in group.run(reduce_drawn, dtype, shape, seed, op, scales):
        assert_close(got, want, dtype, op)


@settings(max_examples=40, deadline=None)
@given(drawn=st.data())
def test_a_reducescatter_gives_every_rank_its_rows_of_the_allreduce(group, drawn):
    dtype = drawn.draw(st.sampled_from(DTYPES))
    op = drawn.draw(st.sampled_from(ops_of(dtype)))
    shape = [drawn.draw(st.integers(0, 2000)), *drawn.draw(st.lists(st.integers(1, 4), max_size=2))]
    seed = drawn.draw(st.integers(0, 1000))
    want = reduced(dtype, shape, seed, op)
    parts = group.run(scatter_drawn, dtype, shape, seed, op)
    assert [len(part) for part in parts] == [math.ceil((shape[0] - rank) / RANKS) for rank in range(RANKS)]
    assert_close(np.concatenate(parts), want, dtype, op)
