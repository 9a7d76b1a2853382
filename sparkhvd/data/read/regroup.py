"""Divides the batches of a fixed number of shards among any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count, pairwise
from typing import Protocol

import numpy as np

from sparkhvd.data.read.batches import Arrays, Batch, BatchSource
from sparkhvd.data.read.prefetch import StopSignal
from sparkhvd.data.read.resume import Division
from sparkhvd.data.schema import columns
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.world import World


class Shard(BatchSource, Protocol):
    """The rows of one of several shards, in batches."""

    def division_of(self, epoch: int) -> Division:
        """Return the division of an epoch's rows into the batches of the shards."""


@dataclass(frozen=True)
class RegroupedSource:
    """The rows of one rank if there are more or fewer ranks than shards (a ``BatchSource``).

    A step has the same rows in the same order as with one rank per shard. Each rank takes a contiguous part of them,
    from the same shards in every step. So the steps of an epoch and the rows of a step do not depend on the number of
    ranks.

    Attributes:
        open_shard: opens a shard by its number.
        shards: the number of shards.
        world: this rank and the number of ranks.
        epoch_begun: the epoch to resume, whose division may differ from that of the other epochs.
        avoid_single_rows: whether a rank with one row leaves it to another rank, because batch normalization cannot
            train on a single row.
    """

    open_shard: Callable[[int], Shard]
    shards: int
    world: World
    epoch_begun: int = 0
    avoid_single_rows: bool = False

    @cached_property
    def first_shard(self) -> Shard:
        """Return the first shard; the others have the same columns, steps and divisions."""
        return self.open_shard(0)

    @property
    def schema(self) -> DataSchema:
        """Return the columns of every batch."""
        return self.first_shard.schema

    def steps(self) -> int:
        """Return the number of steps per epoch, the same for any number of ranks."""
        return self.first_shard.steps()

    def rows(self) -> int:
        """Return the number of rows of the split over all ranks."""
        return self.first_shard.rows()

    def division_of(self, epoch: int) -> Division:
        """Return the division of an epoch's rows into the batches of the shards."""
        return self.first_shard.division_of(epoch)

    def has_rows(self, step: int) -> bool:
        """Return whether this rank has rows in a step both of the epoch to resume and of the others."""
        epochs = (self.epoch_begun, self.epoch_begun + 1)
        return all(self._pieces(self._rows_in(self.division_of(epoch), step)) for epoch in epochs)

    def epoch(self, number: int, first_step: int = 0, stop: StopSignal | None = None) -> Iterator[Batch]:
        """Yield the batches of an epoch from a step on. Closing it ends the prefetching at once."""
        division = self.division_of(number)
        opened: dict[int, Iterator[tuple[int, Batch]]] = {}
        with ExitStack() as stack:
            for step in range(first_step, division.steps()):
                rows = self._rows_in(division, step)
                pieces, parts = self._pieces(rows), []
                for shard, piece in pieces:
                    if shard not in opened:
                        batches = self.open_shard(shard).epoch(number, step, stop)
                        stack.callback(batches.close)  # type: ignore[attr-defined]  # a generator; this ends its threads
                        opened[shard] = zip(count(step), batches, strict=False)
                    batch = next(batch for index, batch in opened[shard] if index == step)
                    parts.append({name: array[piece] for name, array in batch.columns.items()})
                yield Batch(self._joined(parts), sum(piece.stop - piece.start for _, piece in pieces), sum(rows))

    def _rows_in(self, division: Division, step: int) -> list[int]:
        """Return the number of rows of every shard in a step."""
        return [division.rows_in(shard, step) for shard in range(self.shards)]

    def _pieces(self, rows: Sequence[int]) -> list[tuple[int, slice]]:
        """Return this rank's rows of a step by shard; ``rows`` are the row counts of the shards."""
        starts = [0, *accumulate(rows)]
        ends = divide(rows, self.world.size, avoid_single_rows=self.avoid_single_rows)
        first, last = ends[self.world.rank : self.world.rank + 2]
        pieces = [
            (shard, slice(max(first, start) - start, min(last, stop) - start))
            for shard, (start, stop) in enumerate(pairwise(starts))
        ]
        return [(shard, piece) for shard, piece in pieces if piece.start < piece.stop]

    def _joined(self, parts: list[Arrays]) -> Arrays:
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return columns.no_rows(self.schema)
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def divide(shards: Sequence[int], size: int, *, avoid_single_rows: bool = False) -> list[int]:
    """Return the positions in the rows of a step where the parts of ``size`` ranks begin and where the last one ends.

    A rank's part is the same fraction of the shards in every step.

    Args:
        shards: the rows of every shard.
        size: the number of ranks.
        avoid_single_rows: whether to add a part of one row to a neighboring part.
    """
    starts = [0, *accumulate(shards)]
    bounds = []
    for rank in range(size):
        shard, part = divmod(rank * len(shards), size)
        bounds.append(starts[shard] + shards[shard] * part // size)
    bounds.append(starts[-1])
    if avoid_single_rows:
        for rank in range(size - 1):
            if bounds[rank + 1] - bounds[rank] == 1:
                bounds[rank + 1] -= 1
        if bounds[-1] - bounds[-2] == 1:
            bounds[1:] = [bounds[-1] if bound == bounds[-2] else bound for bound in bounds[1:]]
    return bounds
