from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkhvd.data.plan import OwnBlocks, Plan, SharedBlocks
from sparkhvd.errors import ConfigError

blocks = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any).map(tuple)
plans = st.builds(
    Plan,
    shards=st.builds(SharedBlocks, block_rows=blocks, size=st.integers(1, 5), keep=st.booleans()),
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


def of_rank(plan: Plan, rank: int, epoch: int = 0) -> list[int]:
    return [row for step in delivered(plan, epoch) for row in step[rank]]


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
            assert all(0 <= p.start < p.stop <= plan.shards.block_rows[p.block] for p in window.pieces)
            assert read <= max(plan.window_rows, plan.batch_size), "a window holds more rows than allowed"
            assert sum(window.rows) == (read if window.order is None else len(window.order))


@given(plans, epochs)
def test_the_pieces_are_those_of_the_windows_with_neighbours_joined(plan, epoch):
    def rows(pieces):
        return [(piece.block, row) for piece in pieces for row in range(piece.start, piece.stop)]

    for rank in range(plan.size):
        pieces = list(plan.pieces(rank, epoch))
        assert rows(pieces) == rows(piece for window in plan.windows(rank, epoch) for piece in window.pieces)
        assert all((a.block, a.stop) != (b.block, b.start) for a, b in pairwise(pieces))


@given(plans, epochs)
def test_a_rank_decodes_about_its_part_of_the_rows_and_no_block_inside_of_it_twice(plan, epoch):
    """Decoding starts where a block starts, so the worst is one block more than the rank's own rows at either end.

    The order of the blocks is a circle: a part that goes nearly all around may begin and end in the same block. Kept
    parts are mixed, so these two pieces may then lie anywhere.
    """
    for rank in range(plan.size):
        pieces = list(plan.pieces(rank, epoch))
        times = Counter(piece.block for piece in pieces)
        again = [block for block, number in times.items() if number > 1]
        assert not again or (len(again), times[again[0]]) == (1, 2)
        if again and not plan.shards.keep:
            assert [pieces[0].block, pieces[-1].block] == again * 2
        decoded = sum({piece.block: piece.stop for piece in sorted(pieces, key=lambda p: p.stop)}.values())
        assert decoded <= plan.shards.rows[rank] + 2 * max(plan.shards.block_rows)


@given(plans, epochs, st.data())
def test_an_epoch_can_be_continued_at_any_step(plan, epoch, data):
    steps_per_epoch = data.draw(st.one_of(st.none(), st.integers(1, 3 * plan.steps())))
    plan = replace(plan, steps_per_epoch=steps_per_epoch)
    first = data.draw(st.integers(0, plan.steps()))
    rank = data.draw(st.integers(0, plan.size - 1))
    whole = list(plan._batches(rank, epoch))[first:]
    starts = np.cumsum([0, *plan.shards.block_rows])
    found = []
    for window in plan.windows(rank, epoch, first):
        ids = np.concatenate(
            [np.arange(starts[p.block] + p.start, starts[p.block] + p.stop) for p in window.pieces] or [[]]
        )
        ids = ids if window.order is None else ids[window.order]
        ends = np.cumsum([0, *window.rows])
        found += [ids[a:b] for a, b in pairwise(ends)]
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in whole]


@given(plans, epochs)
def test_the_same_seed_gives_the_same_plan(plan, epoch):
    assert delivered(plan, epoch) == delivered(replace(plan), epoch)


@given(plans, epochs)
def test_without_shuffling_the_shards_are_the_dataset_in_order(plan, epoch):
    ordered = replace(plan, shuffle=False)
    assert [row for rank in range(plan.size) for row in of_rank(ordered, rank, epoch)] == list(range(plan.total_rows))


@given(plans, epochs)
def test_a_kept_shard_has_the_same_rows_in_every_epoch(plan, epoch):
    kept = replace(plan, shards=replace(plan.shards, keep=True))
    for rank in range(plan.size):
        assert sorted(of_rank(kept, rank, epoch)) == sorted(of_rank(kept, rank, epoch + 1))
        rows = {(p.block, row) for p in kept.shard(rank) for row in range(p.start, p.stop)}
        assert rows == {(p.block, row) for p in kept.pieces(rank, epoch) for row in range(p.start, p.stop)}


@given(plans, epochs, st.integers(1, 60))
@settings(max_examples=60)
def test_steps_per_epoch_cuts_an_epoch_or_continues_with_further_passes(plan, epoch, steps):
    chosen = replace(plan, steps_per_epoch=steps)
    batches = delivered(chosen, epoch)
    one_pass = delivered(plan, epoch)
    assert len(batches) == chosen.steps() == steps
    assert batches[: len(one_pass)] == one_pass[:steps]
    for begin in range(0, steps - len(one_pass) + 1, len(one_pass)):
        rows = sorted(row for step in batches[begin : begin + len(one_pass)] for rank in step for row in rank)
        assert rows == list(range(plan.total_rows))


given_rows = st.lists(st.lists(st.integers(0, 30), max_size=4).map(tuple), min_size=1, max_size=4).filter(
    lambda ranks: any(map(any, ranks))
)


@given(given_rows, st.integers(1, 9), st.booleans(), st.integers(1, 60), epochs, st.integers(0, 2**32))
def test_rows_that_were_dealt_out_before_come_once_in_as_many_steps_on_every_rank(  # noqa: PLR0917
    ranks, batch, shuffle, window, epoch, seed
):
    counts = tuple(map(sum, ranks))
    plans = [Plan(OwnBlocks(blocks, counts), batch, seed, shuffle, window) for blocks in ranks]
    assert {plan.steps() for plan in plans} == {-(-max(counts) // batch)}
    per_rank = [list(plan._batches(rank, epoch)) for rank, plan in enumerate(plans)]
    for count, batches in zip(counts, per_rank, strict=True):
        assert sorted(row for ids in batches for row in ids.tolist()) == list(range(count))
    stated = [[rows for w in plan.windows(r, epoch) for rows in w.global_rows] for r, plan in enumerate(plans)]
    assert stated == [[sum(map(len, step)) for step in zip(*per_rank, strict=True)]] * len(ranks)


def test_a_shuffled_epoch_differs_from_the_next_from_another_seed_and_from_the_next_pass():
    for window_rows in (10_000, 64):
        plan = Plan(SharedBlocks((100, 150, 250), 2), 8, seed=1, shuffle=True, window_rows=window_rows)
        orders = [flat(plan, 0), flat(plan, 1), flat(replace(plan, seed=2), 0)]
        twice = flat(replace(plan, steps_per_epoch=2 * plan.steps()), 0)
        orders += [twice[500:], list(range(500))]
        assert len({tuple(order) for order in orders}) == len(orders)


def test_ranks_exchange_rows_between_epochs_even_where_there_is_one_block():
    plan = Plan(SharedBlocks((1000,), 2), 10, seed=3, shuffle=True, window_rows=1000)
    first = [set(of_rank(plan, 0, epoch)) for epoch in range(4)]
    assert len(set(map(frozenset, first))) == 4
    assert all(len(rows) == 500 for rows in first)


def test_the_rows_of_a_window_are_mixed_across_its_blocks():
    plan = Plan(SharedBlocks((500, 500), 1), 10, seed=3, shuffle=True, window_rows=1000)
    order = np.array(flat(plan))
    assert 150 < np.count_nonzero(order[:500] < 500) < 350
    assert abs(np.corrcoef(np.arange(1000), order)[0, 1]) < 0.2


def test_the_last_global_batch_is_split_evenly_and_ranks_may_have_nothing():
    plan = Plan(SharedBlocks((10,), 4), 2, seed=0, shuffle=False, window_rows=8)
    assert delivered(plan) == [[[0, 1], [3, 4], [6, 7], [8, 9]], [[2], [5], [], []]]


def test_a_long_epoch_is_planned_lazily():
    plan = Plan(SharedBlocks((2**40,) * 4, 2), 32, seed=0, shuffle=False, window_rows=1024)
    window = next(plan.windows(1, 0))
    assert (window.pieces[0].block, window.pieces[0].start, window.pieces[0].stop) == (2, 0, 1024)


@pytest.mark.parametrize("name", ["batch_size", "window_rows", "steps_per_epoch"])
def test_a_number_below_one_is_refused_by_name(name):
    values = {"batch_size": 1, "window_rows": 1, "steps_per_epoch": 1, name: 0}
    with pytest.raises(ConfigError, match=f"^{name} is 0; it must be at least 1"):
        Plan(SharedBlocks((3,), 1), seed=0, shuffle=False, **values)


def test_a_job_without_ranks_is_refused():
    with pytest.raises(ConfigError, match=r"^size is 0; it must be at least 1"):
        SharedBlocks((3,), 0)


def test_a_split_without_rows_is_refused():
    with pytest.raises(ConfigError, match="There are no rows to plan for"):
        Plan(SharedBlocks((0, 0), 1), 1, 0, False, 1)
