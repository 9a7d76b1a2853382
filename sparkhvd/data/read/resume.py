"""Resumes an epoch that a run with another number of ranks began."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sparkhvd.data.read.batches import Batch
from sparkhvd.data.read.prefetch import StopSignal
from sparkhvd.data.read.readers import RowSource
from sparkhvd.data.schema import columns
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.world import World

Indices = npt.NDArray[np.int64]


class Division(Protocol):
    """The division of an epoch's rows into the batches of ranks."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    def steps(self) -> int:
        """Return the number of steps in the epoch."""

    def rows_in(self, rank: int, step: int) -> int:
        """Return the number of rows of a rank in a step."""


@dataclass(frozen=True)
class RemainderDivision:
    """The division of the rest of an epoch (a ``Division``).

    Attributes:
        rows: the rows of each remaining batch that has rows, in the order in which they are assigned to ranks.
        size: the number of ranks.
    """

    rows: Indices
    size: int

    def steps(self) -> int:
        """Return the number of steps that remain in the epoch."""
        return -(-len(self.rows) // self.size)

    def part(self, rank: int) -> slice:
        """Return the batches of a rank, one per step."""
        return slice(rank * len(self.rows) // self.size, (rank + 1) * len(self.rows) // self.size)

    def rows_in(self, rank: int, step: int) -> int:
        """Return the number of rows of a rank in a step."""
        part = self.rows[self.part(rank)]
        return int(part[step]) if step < len(part) else 0


@dataclass(frozen=True)
class EpochRemainder:
    """The rows of one rank in an epoch that another number of ranks began (a ``BatchSource``).

    The batches that the old ranks have not trained on are assigned to the new ranks in contiguous parts, ordered by old
    rank, so that a rank reads little more than its part. Every row of the epoch appears exactly once. Later epochs come
    from ``whole``. If the old ranks had themselves resumed the epoch, ``old`` opens an ``EpochRemainder``, too.

    Attributes:
        whole: the rows of this rank in all other epochs.
        epoch_begun: the epoch to resume.
        first_step: the number of steps that the old ranks completed.
        old: opens the rows of an old rank.
        plan: the division of the epoch among the old ranks.
        world: this rank and the number of ranks.
    """

    whole: RowSource
    epoch_begun: int
    first_step: int
    old: Callable[[int], RowSource | EpochRemainder]
    plan: Division
    world: World

    @property
    def schema(self) -> DataSchema:
        """Return the columns of every batch."""
        return self.whole.schema

    def steps(self) -> int:
        """Return the number of steps in a whole epoch."""
        return self.whole.steps()

    @cached_property
    def division(self) -> RemainderDivision:
        """Return the division of the rest of the epoch among the new ranks."""
        return RemainderDivision(self._rows_left.ravel()[self._batch_ids], self.world.size)

    def division_of(self, epoch: int) -> Division:
        """Return the division of an epoch's rows into the batches of ranks."""
        return self.division if epoch == self.epoch_begun else self.whole.division_of(epoch)

    def rows(self) -> int:
        """Return the number of rows of the split over all ranks."""
        return self.whole.rows()

    def has_rows(self, step: int) -> bool:
        """Return whether this rank has rows in a step both of the epoch to resume and of whole epochs."""
        return self.division.rows_in(self.world.rank, step) > 0 and self.whole.has_rows(step)

    def epoch(self, number: int, first_step: int = 0, stop: StopSignal | None = None) -> Iterator[Batch]:
        """Return the batches of an epoch from a step on."""
        if number != self.epoch_begun:
            return self.whole.epoch(number, first_step, stop)
        return self._remaining_batches(first_step, stop)

    def _remaining_batches(self, first_step: int, stop: StopSignal | None) -> Iterator[Batch]:
        division, size = self.division, self.world.size
        batch_ids = self._batch_ids[division.part(self.world.rank)][first_step:]
        with closing(self._batches_at(batch_ids, stop)) as batches:
            for step in range(first_step, division.steps()):
                global_rows = sum(division.rows_in(rank, step) for rank in range(size))
                batch = next(batches, None)
                if batch is None:
                    yield Batch(columns.no_rows(self.schema), 0, global_rows)
                else:
                    yield replace(batch, global_rows=global_rows)

    def _batches_at(self, batch_ids: Indices, stop: StopSignal | None) -> Generator[Batch]:
        """Yield the batches with these indices, one old rank after the other."""
        left = self._rows_left.shape[1]
        for rank in np.unique(batch_ids // left).tolist():
            steps = batch_ids[batch_ids // left == rank] % left
            batches = self.old(rank).epoch(self.epoch_begun, self.first_step + int(steps[0]), stop)
            try:
                for batch in islice(batches, int(steps[-1] - steps[0]) + 1):
                    if batch.rows:
                        yield batch
            finally:
                batches.close()  # type: ignore[attr-defined]  # a generator; this ends its threads

    @cached_property
    def _rows_left(self) -> Indices:
        """Return the rows of every old rank in every remaining step."""
        steps = range(self.first_step, self.plan.steps())
        rows = [[self.plan.rows_in(rank, step) for step in steps] for rank in range(self.plan.size)]
        return np.array(rows, np.int64)

    @cached_property
    def _batch_ids(self) -> Indices:
        """Return the indices of the remaining batches that have rows, ordered by old rank."""
        return np.flatnonzero(self._rows_left)
