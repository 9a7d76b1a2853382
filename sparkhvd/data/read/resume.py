"""Resumes an epoch that a run with another number of ranks began."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np
import numpy.typing as npt

from sparkhvd.data.read.batches import Batch
from sparkhvd.data.read.plan import Plan
from sparkhvd.data.read.readers import RowSource
from sparkhvd.data.schema import columns
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.world import World

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EpochRemainder:
    """The rows of one rank in an epoch that another number of ranks began (a ``BatchSource``).

    The batches that the old ranks have not trained on are assigned to the new ranks in contiguous parts, ordered by old
    rank, so that a rank reads little more than its part. Every row of the epoch appears exactly once. Later epochs are
    those of ``whole``.

    Attributes:
        whole: the rows of this rank in all other epochs.
        epoch_begun: the epoch to resume.
        first_step: the number of steps that the old ranks completed.
        old: opens the rows of an old rank.
        plan: the plan of the old ranks.
        world: this rank and the number of ranks.
    """

    whole: RowSource
    epoch_begun: int
    first_step: int
    old: Callable[[int], RowSource]
    plan: Plan
    world: World

    @property
    def schema(self) -> DataSchema:
        """The columns of every batch."""
        return self.whole.schema

    def steps(self) -> int:
        """Return the steps per whole epoch."""
        return self.whole.steps()

    def steps_left(self) -> int:
        """Return the number of steps that remain in the epoch to resume."""
        return -(-len(self._batch_ids) // self.world.size)

    def rows(self) -> int:
        """Return the rows of the split over all ranks."""
        return self.whole.rows()

    def has_rows(self, step: int) -> bool:
        """Return whether this rank has rows in a step both of the epoch to resume and of whole epochs."""
        return step < len(self._part(self.world.rank)) and self.whole.has_rows(step)

    def epoch(self, number: int, first_step: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from a step on."""
        if number != self.epoch_begun:
            return self.whole.epoch(number, first_step)
        return self._remaining_batches(first_step)

    def _remaining_batches(self, first_step: int) -> Iterator[Batch]:
        rows = self._rows_left.ravel()
        parts = [self._part(rank) for rank in range(self.world.size)]
        batches = self._batches_at(parts[self.world.rank])
        for step in range(self.steps_left()):
            together = sum(int(rows[part[step]]) for part in parts if step < len(part))
            batch = next(batches, None)
            if step >= first_step:
                yield (
                    Batch(self._empty_arrays(), 0, together) if batch is None else replace(batch, global_rows=together)
                )

    def _batches_at(self, batch_ids: Indices) -> Iterator[Batch]:
        """Yield the batches with these indices, one old rank after the other."""
        left = self._rows_left.shape[1]
        for rank in np.unique(batch_ids // left).tolist():
            steps = batch_ids[batch_ids // left == rank] % left
            batches = self.old(rank).epoch(self.epoch_begun, self.first_step + int(steps[0]))
            try:
                for batch in islice(batches, int(steps[-1] - steps[0]) + 1):
                    if batch.rows:
                        yield batch
            finally:
                batches.close()  # type: ignore[attr-defined]  # a generator; this ends its threads

    @cached_property
    def _rows_left(self) -> Indices:
        """The rows of every old rank in every remaining step."""
        steps = range(self.first_step, self.plan.steps())
        rows = [[self.plan.rows_in(rank, step) for step in steps] for rank in range(self.plan.size)]
        return np.array(rows, np.int64)

    @cached_property
    def _batch_ids(self) -> Indices:
        """The indices of the remaining batches that have rows, ordered by old rank."""
        return np.flatnonzero(self._rows_left)

    def _part(self, rank: int) -> Indices:
        count = len(self._batch_ids)
        return self._batch_ids[rank * count // self.world.size : (rank + 1) * count // self.world.size]

    def _empty_arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        return {column.name: columns.empty(column, 0) for column in self.schema.columns}
