from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest

from sparkhvd.data.read.batches import Batch
from sparkhvd.data.read.plan import Plan
from sparkhvd.data.read.resume import EpochRemainder
from sparkhvd.data.read.shards import SharedBlocks
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.world import World

SCHEMA = DataSchema((ColumnSpec("row", "int64", (), "feature", "scalar"),))


class Rows:
    """A ``RowSource`` of a plan without data: the rows are their ids."""

    schema = SCHEMA

    def __init__(self, plan, rank):
        self.plan, self.rank = plan, rank

    def steps(self):
        return self.plan.steps()

    def rows(self):
        return self.plan.total_rows

    def has_rows(self, step):
        return self.plan.rows_in(self.rank, step) > 0

    def division_of(self, epoch):
        return self.plan

    def epoch(self, number, first_step=0, stop=None):
        for step, batch in enumerate(self.plan.global_batches(number)):
            if step >= first_step:
                together = sum(map(len, batch))
                yield Batch({"row": batch[self.rank]}, len(batch[self.rank]), together)


def plan(size, batch, *, shuffle=True, steps=None):
    return Plan(SharedBlocks((40, 7, 25, 31), size), batch, 3, shuffle, 16, steps)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2), (1, 4), (4, 1), (2, 2), (7, 5)])
@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_partial_epoch_is_finished_by_another_number_of_ranks_without_repeats(old, new, done, shuffle):
    before, after = plan(old, 4, shuffle=shuffle), plan(new, 8, shuffle=shuffle)
    seen = Counter(
        row for step, batch in enumerate(before.global_batches(2)) if step < done for row in np.hstack(batch)
    )
    ranks = [list(rest_of(before, after, rank, new, done).epoch(2)) for rank in range(new)]
    assert {len(batches) for batches in ranks} == {rest_of(before, after, 0, new, done).division.steps()}
    for step in zip(*ranks, strict=True):
        assert {batch.global_rows for batch in step} == {sum(batch.rows for batch in step)}
        assert all(len(batch.columns["row"]) == batch.rows <= 4 for batch in step)
        assert sum(batch.rows for batch in step) > 0
        seen.update(row for batch in step for row in batch.columns["row"])
    assert seen == Counter(range(103))


def rest_of(before, after, rank, new, done):
    return EpochRemainder(Rows(after, rank), 2, done, lambda old: Rows(before, old), before, World(rank=rank, size=new))


def test_later_steps_and_other_epochs_are_unchanged():
    before, after = plan(2, 4), plan(3, 8)
    rest = rest_of(before, after, 1, 3, 5)
    whole, later = list(rest.epoch(2)), list(rest.epoch(2, 2))
    assert [batch.columns["row"].tolist() for batch in whole[2:]] == [b.columns["row"].tolist() for b in later]
    mine = [batch.columns["row"].tolist() for batch in Rows(after, 1).epoch(3)]
    assert [batch.columns["row"].tolist() for batch in rest.epoch(3)] == mine
    assert (rest.steps(), rest.rows(), rest.schema) == (after.steps(), 103, SCHEMA)


def test_an_epoch_of_several_passes_is_resumed_too():
    before, after = plan(2, 10, steps=15), plan(3, 10, steps=15)
    everything = Counter(int(row) for batch in before.global_batches(2) for row in np.hstack(batch))
    done = Counter(
        int(row) for step, batch in enumerate(before.global_batches(2)) if step < 8 for row in np.hstack(batch)
    )
    counts = Counter(
        int(row)
        for rank in range(3)
        for batch in rest_of(before, after, rank, 3, 8).epoch(2)
        for row in batch.columns["row"]
    )
    assert done + counts == everything


@pytest.mark.parametrize(("sizes", "done"), [((2, 3, 1), (3, 2)), ((1, 4, 2, 3), (5, 1, 2)), ((3, 3, 3), (2, 0))])
def test_a_rest_is_finished_by_other_ranks_again_without_repeats(sizes, done):
    plans = [plan(size, 4) for size in sizes]

    def opened(index, rank):
        if index == 0:
            return Rows(plans[0], rank)
        earlier = plans[0] if index == 1 else opened(index - 1, 0).division
        world = World(rank=rank, size=sizes[index])
        old = partial(opened, index - 1)
        return EpochRemainder(Rows(plans[index], rank), 2, done[index - 1], old, earlier, world)

    seen: Counter[int] = Counter()
    for index, size in enumerate(sizes):
        ranks = [list(opened(index, rank).epoch(2)) for rank in range(size)]
        for step in list(zip(*ranks, strict=True))[: None if index == len(done) else done[index]]:
            assert {batch.global_rows for batch in step} == {sum(batch.rows for batch in step)}
            seen.update(int(row) for batch in step for row in batch.columns["row"])
    assert seen == Counter(range(103))
