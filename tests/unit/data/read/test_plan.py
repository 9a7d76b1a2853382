from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkhvd.data.read.plan import Plan
from sparkhvd.data.read.shards import SLICES, OwnBlocks, SharedBlocks
from sparkhvd.data.read.stratified import in_portions, part_in_portions
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
def test_every_row_is_read_exactly_once_per_epoch(plan, epoch):
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
def test_the_windows_of_a_rank_state_their_rows(plan, epoch):
    totals = [sum(len(rank) for rank in step) for step in delivered(plan, epoch)]
    for rank in range(plan.size):
        windows = list(plan.windows(rank, epoch))
        assert [rows for window in windows for rows in window.global_rows] == totals
        for window in windows:
            read = sum(piece.rows for piece in window.pieces)
            assert all(0 <= p.start < p.stop <= plan.shards.block_rows[p.block] for p in window.pieces)
            assert read <= max(plan.window_rows, plan.batch_size), "a window holds more rows than allowed"
            assert sum(window.rows) == (read if window.order is None else len(window.order))
            assert plan.read_by_all or sum(window.rows) == read


@given(plans, epochs)
def test_pieces_are_those_of_the_windows_with_adjacent_ones_merged(plan, epoch):
    def rows(pieces):
        return [(piece.block, row) for piece in pieces for row in range(piece.start, piece.stop)]

    for rank in range(plan.size):
        pieces = list(plan.pieces(rank, epoch))
        assert rows(pieces) == rows(piece for window in plan.windows(rank, epoch) for piece in window.pieces)
        assert all((a.block, a.stop) != (b.block, b.start) for a, b in pairwise(pieces))


@given(plans, epochs)
def test_a_rank_decodes_its_part_of_the_rows_and_a_bounded_number_of_other_blocks(plan, epoch):
    """Decoding starts at the beginning of a block, so a part of a block may also decode the rows before it."""
    for rank in range(plan.size):
        if plan.read_by_all:
            assert sum(piece.rows for piece in plan.pieces(rank, epoch)) == plan.total_rows <= plan.window_rows
            continue
        pieces = list(plan.pieces(rank, epoch))
        many = len([rows for rows in plan.shards.block_rows if rows]) >= SLICES * plan.size
        again = sum(piece.start for piece in pieces if piece.start)
        assert sum(piece.rows for piece in pieces) == plan.shards.rows[rank]
        if not plan.shards.keep:  # kept rows are not decoded again
            cuts = 1 if many else len(pieces)
            assert again <= cuts * max(plan.shards.block_rows)
            assert many or len(pieces) <= 2 * SLICES + len(plan.shards.block_rows) + 2


@given(plans, epochs, st.data())
def test_an_epoch_can_be_resumed_at_any_step(plan, epoch, data):
    steps_per_epoch = data.draw(st.one_of(st.none(), st.integers(1, 3 * plan.steps())))
    plan = replace(plan, steps_per_epoch=steps_per_epoch)
    first = data.draw(st.integers(0, plan.steps()))
    rank = data.draw(st.integers(0, plan.size - 1))
    whole = list(plan._batches(rank, epoch))[first:]
    starts = np.cumsum([0, *plan.shards.block_rows])
    resumed = []
    for window in plan.windows(rank, epoch, first):
        ids = np.concatenate(
            [np.arange(starts[p.block] + p.start, starts[p.block] + p.stop) for p in window.pieces] or [[]]
        )
        ids = ids if window.order is None else ids[window.order]
        ends = np.cumsum([0, *window.rows])
        resumed += [ids[a:b] for a, b in pairwise(ends)]
    assert [ids.tolist() for ids in resumed] == [ids.tolist() for ids in whole]


@given(plans, epochs)
def test_the_same_seed_gives_the_same_plan(plan, epoch):
    assert delivered(plan, epoch) == delivered(replace(plan), epoch)


@given(plans, epochs)
def test_without_shuffling_the_shards_are_the_dataset_in_order(plan, epoch):
    ordered = replace(plan, shuffle=False)
    assert [row for rank in range(plan.size) for row in of_rank(ordered, rank, epoch)] == list(range(plan.total_rows))


@given(plans, epochs)
def test_a_rank_that_keeps_rows_reads_the_same_rows_in_every_epoch(plan, epoch):
    kept = replace(plan, shards=replace(plan.shards, keep=True))
    for rank in range(plan.size):
        if not kept.read_by_all:
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
def test_redistributed_rows_are_read_once_with_equal_steps_on_every_rank(  # noqa: PLR0917
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


LABELS = {
    "sorted": lambda ids, total, classes: ids * classes // total,
    "alternating": lambda ids, _, classes: ids % classes,
}


def class_counts(plan, labels, classes, epoch):
    """Return the number of rows of each class in each batch, by rank and step."""
    names = LABELS[labels](np.arange(plan.total_rows), plan.total_rows, classes)
    counts = [[np.bincount(names[ids], minlength=classes) for ids in step] for step in plan.global_batches(epoch)]
    return np.array(counts).transpose(1, 0, 2)


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize(
    ("blocks", "window"),
    [((20_000,), 30_000), ((2_500,) * 8, 30_000), ((20_000,), 2_000), ((100,) * 200, 2_000)],
    ids=["one block in a window", "small blocks in a window", "one block of many windows", "many blocks"],
)
def test_every_rank_has_a_fair_sample_of_all_classes_in_every_epoch(blocks, window, labels, size):
    """Shares may differ by 10%, like those of a uniform draw of as many rows, whatever the order of the rows."""
    classes = size
    plan = Plan(SharedBlocks(blocks, size), 50, seed=11, shuffle=True, window_rows=window)
    for epoch in range(3):
        of_rank = class_counts(plan, labels, classes, epoch).sum(axis=1)
        wanted = 20_000 / size / classes
        assert np.abs(of_rank / wanted - 1).max() <= 0.1


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize(("blocks", "window"), [((20_000,), 20_000), ((250,) * 80, 4_000), ((250,) * 80, 2_500)])
def test_every_batch_samples_the_classes_like_a_uniform_draw(blocks, window, labels):
    plan = Plan(SharedBlocks(blocks, 2), 50, seed=11, shuffle=True, window_rows=window)
    for of_rank in class_counts(plan, labels, 2, epoch=1):
        share = of_rank[:, 0] / 50
        assert abs(share.mean() - 0.5) < 0.01
        assert share.std() < 0.12  # 0.07 for a uniform draw; a window may have an additional block of one class


@pytest.mark.parametrize("keep", [False, True], ids=["given", "kept"])
def test_windows_of_rows_that_can_be_read_in_any_order_are_fair_samples(keep):
    """The direct data path orders rows by a hash of their content, so equal rows are adjacent."""
    shards = SharedBlocks((20_000,), 1, keep=True) if keep else OwnBlocks((20_000,), (20_000,))
    plan = Plan(shards, 100, seed=2, shuffle=True, window_rows=2_000)
    share = class_counts(plan, "sorted", 4, epoch=0)[0] / 100
    windows = share.reshape(10, 20, 4).mean(axis=1)
    assert np.abs(windows - 0.25).max() < 0.1


def test_a_last_batch_of_one_row_takes_a_second_row_from_the_previous_batch():
    plan = Plan(SharedBlocks((17,), 2), 4, seed=0, shuffle=False, window_rows=8, pair_last_row=True)
    assert [[len(rank) for rank in step] for step in delivered(plan)] == [[4, 4], [3, 4], [2, 0]]
    assert flat(plan) != list(range(17))
    assert sorted(flat(plan)) == list(range(17))
    assert [plan.rows_in(0, step) for step in range(3)] == [4, 3, 2]
    assert not plan.has_single_row()


@given(plans, epochs)
def test_single_rows_are_paired_whenever_possible(plan, epoch):
    paired = replace(plan, pair_last_row=True)
    sizes = [[len(rank) for rank in step] for step in delivered(paired, epoch)]
    assert sorted(flat(paired, epoch)) == list(range(plan.total_rows))
    assert len(sizes) == plan.steps()
    assert paired.has_single_row() == any(1 in step for step in sizes)
    if plan.batch_size > 2 and min(plan.shards.rows) > 1:
        assert not paired.has_single_row()
    stated = [[rows for w in paired.windows(rank, epoch) for rows in w.global_rows] for rank in range(plan.size)]
    assert stated == [list(map(sum, sizes))] * plan.size


def test_shuffled_epochs_differ_by_epoch_seed_and_pass():
    for window_rows in (10_000, 64):
        plan = Plan(SharedBlocks((100, 150, 250), 2), 8, seed=1, shuffle=True, window_rows=window_rows)
        orders = [flat(plan, 0), flat(plan, 1), flat(replace(plan, seed=2), 0)]
        twice = flat(replace(plan, steps_per_epoch=2 * plan.steps()), 0)
        orders += [twice[500:], list(range(500))]
        assert len({tuple(order) for order in orders}) == len(orders)


def test_ranks_exchange_rows_between_epochs_even_with_one_block():
    plan = Plan(SharedBlocks((1000,), 2), 10, seed=3, shuffle=True, window_rows=1000)
    first = [set(of_rank(plan, 0, epoch)) for epoch in range(4)]
    assert len(set(map(frozenset, first))) == 4
    assert all(len(rows) == 500 for rows in first)


def test_the_rows_of_a_window_are_mixed_across_its_blocks():
    plan = Plan(SharedBlocks((500, 500), 1), 10, seed=3, shuffle=True, window_rows=1000)
    order = np.array(flat(plan))
    assert 150 < np.count_nonzero(order[:500] < 500) < 350
    assert abs(np.corrcoef(np.arange(1000), order)[0, 1]) < 0.2


def test_the_last_global_batch_is_split_evenly_and_ranks_may_have_no_rows():
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


@pytest.mark.parametrize("size", [1, 3])
def test_rows_of_one_window_are_read_in_file_order_and_each_block_once(size):
    """Reading a block in parts would decode it from its beginning for each part."""
    plan = Plan(SharedBlocks((100, 150, 0, 250), size), 8, seed=1, shuffle=True, window_rows=500)
    for rank in range(size):
        assert [(p.block, p.start, p.stop) for p in plan.pieces(rank, 1)] == [(0, 0, 100), (1, 0, 150), (3, 0, 250)]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=4), st.integers(1, 700), st.integers(0, 2**32))
def test_parts_in_portions_contain_each_row_once(sizes, portion, seed):
    def of(part):
        return part_in_portions(sizes, part, portion, np.random.default_rng(seed), np.random.default_rng([seed, part]))

    parts = [of(part) for part in range(len(sizes))]
    assert [len(part) for part in parts] == sizes
    assert sorted(np.concatenate(parts)) == list(range(sum(sizes)))


@given(st.integers(0, 30_000), st.integers(1, 5_000), st.integers(0, 2**32))
def test_portions_contain_each_row_once_and_are_fair_samples(rows, portion, seed):
    order = in_portions(rows, portion, np.random.default_rng(seed))
    assert sorted(order) == list(range(rows))
    run = max(1, rows // 256)
    deviation = 3 * run + 2.5 * (portion * run) ** 0.5  # a portion may have a random half of a sample
    for start in range(0, rows - portion + 1, portion):
        early = np.count_nonzero(order[start : start + portion] < rows // 2)
        assert abs(early - portion / 2) <= deviation
