"""Any number of ranks can divide the shards: a step always has the same rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkhvd.data.read.plan import Plan
from sparkhvd.data.read.regroup import RegroupedSource, divide
from sparkhvd.data.read.resume import EpochRemainder
from sparkhvd.data.read.shards import SharedBlocks
from sparkhvd.world import World
from tests.unit.data.read.test_resume import SCHEMA, Rows

SHARDS = 3


def plan(shards=SHARDS, batch=4, *, steps=None, pair_last_row=False):
    return Plan(SharedBlocks((40, 7, 25, 31), shards), batch, 3, True, 16, steps, pair_last_row)


def regrouped(division, rank, size, **options):
    return RegroupedSource(lambda shard: Rows(division, shard), division.size, World(rank=rank, size=size), **options)


def steps_of(sources, epoch, first_step=0):
    """Return the rows of all ranks in every step; check the counts and arrays of each batch."""
    steps = list(zip(*(source.epoch(epoch, first_step) for source in sources), strict=True))
    for step in steps:
        assert {batch.global_rows for batch in step} == {sum(batch.rows for batch in step)}
        assert all(len(batch.columns["row"]) == batch.rows for batch in step)
        assert all(batch.columns["row"].flags.writeable and batch.columns["row"].flags.c_contiguous for batch in step)
    return [np.hstack([batch.columns["row"] for batch in step]).tolist() for step in steps]


@pytest.mark.parametrize("size", [1, 2, 4, 5, 30])
@pytest.mark.parametrize("steps", [None, 3, 30])
def test_a_step_has_the_same_rows_in_the_same_order_with_any_number_of_ranks(size, steps):
    division = plan(steps=steps)
    expected = [np.hstack(batch).tolist() for batch in division.global_batches(1)]
    sources = [regrouped(division, rank, size) for rank in range(size)]
    assert steps_of(sources, 1) == expected
    assert steps_of(sources, 1, 2) == expected[2:]
    for source in sources:
        assert (source.steps(), source.rows(), source.schema) == (division.steps(), 103, SCHEMA)


def test_ranks_have_equal_parts_of_full_steps_and_read_the_fewest_shards():
    opened = []

    def open_shard(shard):
        opened.append(shard)
        return Rows(plan(4, 6), shard)

    source = RegroupedSource(open_shard, 4, World(rank=1, size=3))
    batches = list(source.epoch(0))
    assert [batch.rows for batch in batches[:4]] == [8, 8, 8, 8]
    assert set(opened) == {0, 1, 2}  # the first shard for the divisions, the others for rows
    assert opened.count(1) == opened.count(2) == 1


def test_has_rows_returns_which_steps_certainly_have_rows():
    division = plan()
    for rank in range(5):
        source = regrouped(division, rank, 5)
        batches = list(source.epoch(0))
        assert [source.has_rows(step) for step in range(source.steps())] == [batch.rows > 0 for batch in batches]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_rest_of_an_epoch_of_other_ranks_is_regrouped_too(size):
    old, division, done = plan(2, 8), plan(), 4
    seen = [row for step, batch in enumerate(old.global_batches(2)) if step < done for row in np.hstack(batch)]

    def open_rest(shard):
        world = World(rank=shard, size=SHARDS)
        return EpochRemainder(Rows(division, shard), 2, done, lambda rank: Rows(old, rank), old, world)

    sources = [RegroupedSource(open_rest, SHARDS, World(rank=rank, size=size), 2) for rank in range(size)]
    rest = steps_of(sources, 2)
    assert len(rest) == open_rest(0).division.steps()
    assert sorted([*seen, *(row for step in rest for row in step)]) == list(range(103))
    assert steps_of(sources, 3) == [np.hstack(batch).tolist() for batch in division.global_batches(3)]
    for source in sources:
        certain = [source.has_rows(step) for step in range(30)]
        for epoch in (2, 3):
            rows = [batch.rows for batch in source.epoch(epoch)]
            assert all(rows[step] for step, has_rows in enumerate(certain) if has_rows)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(sum),
    st.integers(1, 12),
    st.booleans(),
)
def test_parts_are_contiguous_complete_and_without_single_rows_on_request(shards, size, avoid):
    bounds = divide(shards, size, avoid_single_rows=avoid)
    parts = np.diff(bounds)
    assert (bounds[0], bounds[-1], len(parts)) == (0, sum(shards), size)
    assert (parts >= 0).all()
    if avoid and sum(shards) > 1:
        assert 1 not in parts


@given(st.integers(1, 9), st.integers(1, 7), st.integers(1, 12))
def test_parts_of_equal_shards_differ_by_two_rows_at_most(rows, shards, size):
    parts = np.diff(divide([rows] * shards, size))
    assert parts.max() - parts.min() <= 2
