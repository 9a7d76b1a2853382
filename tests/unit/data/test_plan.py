from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkhvd.data.plan import Plan
from sparkhvd.errors import ConfigError

plans = st.builds(
    Plan,
    block_rows=st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any).map(tuple),
    size=st.integers(1, 5),
    batch_size=st.integers(1, 9),
    seed=st.integers(-(2**63), 2**64),
    shuffle=st.booleans(),
    window_rows=st.integers(1, 400),
)
epochs = st.integers(0, 3)


def delivered(plan: Plan, epoch: int = 0) -> list[list[list[int]]]:
    return [[ids.tolist() for ids in step] for step in plan.global_batches(epoch)]


def flat(plan: Plan, epoch: int = 0) -> list[int]:
    return [row for step in delivered(plan, epoch) for rank in step for row in rank]


@given(plans, epochs)
def test_every_row_comes_exactly_once_per_epoch(plan, epoch):
    assert sorted(flat(plan, epoch)) == list(range(plan.total_rows))


@given(plans, epochs)
def test_every_rank_has_the_same_number_of_steps_and_batches_of_the_stated_size(plan, epoch):
    steps = delivered(plan, epoch)
    full = plan.size * plan.batch_size
    assert len(steps) == plan.steps() == -(-plan.total_rows // full)
    for step in steps[:-1]:
        assert [len(rank) for rank in step] == [plan.batch_size] * plan.size
    last = [len(rank) for rank in steps[-1]]
    assert 1 <= sum(last) <= full
    assert max(last) - min(last) <= 1


@given(plans, epochs)
def test_the_windows_of_a_rank_state_the_rows_that_they_deliver(plan, epoch):
    totals = [sum(len(rank) for rank in step) for step in delivered(plan, epoch)]
    for rank in range(plan.size):
        windows = list(plan.windows(rank, epoch))
        assert [rows for window in windows for rows in window.global_rows] == totals
        for window in windows:
            read = sum(piece.rows for piece in window.pieces)
            assert all(0 <= p.start < p.stop <= plan.block_rows[p.block] for p in window.pieces)
            assert read <= max(plan.window_rows, plan.batch_size), "a window holds more rows than allowed"
            assert sum(window.rows) == (read if window.order is None else len(window.order))


@given(plans, epochs)
def test_the_same_seed_gives_the_same_plan(plan, epoch):
    again = Plan(**{name: getattr(plan, name) for name in plan.__dataclass_fields__})
    assert delivered(plan, epoch) == delivered(again, epoch)


@given(plans, epochs)
def test_without_shuffling_the_global_batches_are_the_dataset_in_order(plan, epoch):
    ordered = Plan(plan.block_rows, plan.size, plan.batch_size, plan.seed, False, plan.window_rows)
    assert flat(ordered, epoch) == list(range(plan.total_rows))


@given(plans, epochs, st.integers(1, 60))
@settings(max_examples=60)
def test_steps_per_epoch_cuts_an_epoch_or_continues_with_further_passes(plan, epoch, steps):
    chosen = Plan(**{**{n: getattr(plan, n) for n in plan.__dataclass_fields__}, "steps_per_epoch": steps})
    batches = delivered(chosen, epoch)
    one_pass = delivered(plan, epoch)
    assert len(batches) == chosen.steps() == steps
    assert batches[: len(one_pass)] == one_pass[:steps]
    for begin in range(0, steps - len(one_pass) + 1, len(one_pass)):
        rows = sorted(row for step in batches[begin : begin + len(one_pass)] for rank in step for row in rank)
        assert rows == list(range(plan.total_rows))


@given(
    st.lists(st.integers(1, 30), min_size=6, max_size=10).map(tuple),
    st.integers(2, 4),
    st.integers(1, 5),
    st.integers(0),
)
def test_a_rank_of_a_large_split_reads_a_contiguous_shard_and_every_block_of_it_once(block_rows, size, batch, seed):
    plan = Plan(block_rows, size, batch, seed, True, window_rows=5)
    for rank in range(size):
        if plan.total_rows <= plan.window_rows:
            continue
        pieces = [piece for window in plan.windows(rank, 0) for piece in window.pieces]
        blocks = [piece.block for piece in pieces]
        changes = sum(a != b for a, b in pairwise(blocks))
        assert changes == max(0, len(set(blocks)) - 1), f"rank {rank} comes back to a block: {blocks}"
        for before, after in pairwise(pieces):
            assert before.block != after.block or before.stop == after.start


def test_a_shuffled_epoch_differs_from_the_next_from_another_seed_and_from_the_next_pass():
    for window_rows in (10_000, 64):
        plan = Plan((100, 150, 250), 2, 8, seed=1, shuffle=True, window_rows=window_rows)
        orders = [flat(plan, 0), flat(plan, 1), flat(Plan(plan.block_rows, 2, 8, 2, True, window_rows), 0)]
        twice = flat(Plan(plan.block_rows, 2, 8, 1, True, window_rows, steps_per_epoch=2 * plan.steps()), 0)
        orders += [twice[500:], list(range(500))]
        assert len({tuple(order) for order in orders}) == len(orders)


def test_a_split_that_fits_one_window_is_shuffled_across_all_ranks_and_blocks():
    plan = Plan((500, 500), 2, 10, seed=3, shuffle=True, window_rows=1000)
    first_rank = np.concatenate([step[0] for step in plan.global_batches(0)])
    # Of the rows of one rank about half come from the first block; a shard would have all of them from one.
    assert 150 < np.count_nonzero(first_rank < 500) < 350
    assert abs(np.corrcoef(np.arange(500), first_rank)[0, 1]) < 0.2


def test_the_last_global_batch_is_split_evenly_and_ranks_may_have_nothing():
    plan = Plan((10,), 4, 2, seed=0, shuffle=False, window_rows=8)
    assert delivered(plan) == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8], [9], [], []]]


def test_a_long_epoch_is_planned_lazily():
    plan = Plan((2**40,) * 4, 2, 32, seed=0, shuffle=False, window_rows=1024)
    window = next(plan.windows(1, 0))
    assert (window.pieces[0].start, window.pieces[0].stop) == (32, 64)


@pytest.mark.parametrize("name", ["size", "batch_size", "window_rows", "steps_per_epoch"])
def test_a_number_below_one_is_refused_by_name(name):
    values = {"size": 1, "batch_size": 1, "window_rows": 1, "steps_per_epoch": 1, name: 0}
    with pytest.raises(ConfigError, match=f"^{name} is 0; it must be at least 1"):
        Plan((3,), seed=0, shuffle=False, **values)


def test_a_split_without_rows_is_refused():
    with pytest.raises(ConfigError, match="There are no rows to plan for"):
        Plan((0, 0), 1, 1, 0, False, 1)
