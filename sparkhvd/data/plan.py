"""Which rows a rank reads in which step: a pure function of integers that every rank computes for itself.

One pass over ``R`` rows with ``N`` ranks and batch size ``B`` has ``ceil(R / (N * B))`` steps. Every step but the last
has ``N * B`` rows, ``B`` for each rank; the last has what is left, split evenly (sizes differ by at most one, and ranks
may have none). Every row comes exactly once.

Without shuffling, step ``g`` has the rows ``g * N * B`` and following in dataset order, and rank ``r`` takes the
``r``-th contiguous part of them.

With shuffling there are two ways. A split that fits into one window (the rows that a rank may hold in memory) is
permuted as a whole, and step ``g`` is cut from the permuted rows as above; every rank then reads the whole split. A
larger one is dealt out: its blocks come in a random order, rank ``r`` gets the ``r``-th contiguous shard of that order,
cut by rows, and shuffles its shard window by window. A rank then reads its shard only, and each of its blocks once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, count, pairwise

import numpy as np
import numpy.typing as npt

from sparkhvd.errors import ConfigError

RowIds = npt.NDArray[np.int64]

# What a random stream is for; part of its seed, so that two purposes never share numbers.
_ROW_ORDER, _BLOCK_ORDER, _WINDOW_ORDER = range(3)


@dataclass(frozen=True)
class Piece:
    """The rows ``start`` to ``stop`` (exclusive) of one block."""

    block: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Window:
    """What a rank reads at once, and the steps that come out of it.

    Attributes:
        pieces: what to read, in this order.
        order: the places, among the rows of ``pieces``, of the rows to deliver; None delivers all as they are read.
        rows: this rank's rows in each step of the window.
        global_rows: the rows of all ranks in each of these steps.
    """

    pieces: tuple[Piece, ...]
    order: RowIds | None
    rows: tuple[int, ...]
    global_rows: tuple[int, ...]

    def first(self, steps: int) -> Window:
        """The same window, ending after ``steps`` steps."""
        return replace(self, rows=self.rows[:steps], global_rows=self.global_rows[:steps])


@dataclass(frozen=True)
class Plan:
    """The division of a split's rows into steps and ranks; the module's text states the rules.

    Attributes:
        block_rows: rows of every block (row group), in row order.
        size: number of ranks.
        batch_size: rows of one rank in a full step.
        seed: decides the order where ``shuffle`` is set.
        shuffle: whether every epoch has an order of its own; otherwise rows come in dataset order.
        window_rows: rows that a rank may hold in memory to shuffle them.
        steps_per_epoch: None means one pass over the rows. Fewer steps leave out the pass's last rows (without
            shuffling the same ones in every epoch), more go on with further passes, each with an order of its own.

    Raises:
        ConfigError: there are no rows, or a number is too small.
    """

    block_rows: tuple[int, ...]
    size: int
    batch_size: int
    seed: int
    shuffle: bool
    window_rows: int
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        for name in ("size", "batch_size", "window_rows", "steps_per_epoch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        if min(self.block_rows, default=0) < 0 or self.total_rows < 1:
            raise ConfigError("There are no rows to plan for; prepare a dataset with at least one row.")

    @cached_property
    def total_rows(self) -> int:
        """Rows of the split over all ranks."""
        return sum(self.block_rows)

    def steps(self) -> int:
        """Steps per epoch, the same on every rank and in every epoch."""
        return self.steps_per_epoch or self._steps_per_pass()

    def windows(self, rank: int, epoch: int) -> Iterator[Window]:
        """What ``rank`` reads in ``epoch`` (from 0), piece by piece; together they have ``steps()`` steps."""
        left = self.steps()
        for number in count():
            for window in self._windows_of_pass(rank, epoch, number):
                yield window.first(left)
                left -= len(window.rows)
                if left <= 0:
                    return

    def global_batches(self, epoch: int) -> Iterator[list[RowIds]]:
        """For every step of ``epoch``: the row ids of every rank, in the order that the rank delivers them.

        Row ids count the rows of the split in dataset order, from 0. Their concatenation over the ranks is the global
        batch in the order that equals single-process training.
        """
        per_rank = [self._batches(rank, epoch) for rank in range(self.size)]
        for batches in zip(*per_rank, strict=True):
            yield list(batches)

    def _batches(self, rank: int, epoch: int) -> Iterator[RowIds]:
        starts = [0, *accumulate(self.block_rows)]
        for window in self.windows(rank, epoch):
            read = [np.arange(starts[p.block] + p.start, starts[p.block] + p.stop) for p in window.pieces]
            ids = np.concatenate(read) if read else np.empty(0, np.int64)
            ordered = ids if window.order is None else ids[window.order]
            for start, stop in pairwise([0, *accumulate(window.rows)]):
                yield ordered[start:stop]

    def _steps_per_pass(self) -> int:
        return -(-self.total_rows // (self.size * self.batch_size))

    def _step(self, rank: int, step: int) -> tuple[int, int, int]:
        """Where this rank's part of a step's global batch begins, its rows, and the rows of the global batch."""
        full = self.size * self.batch_size
        rows = min(full, self.total_rows - step * full)
        each, remainder = divmod(rows, self.size)
        return rank * each + min(rank, remainder), each + (rank < remainder), rows

    def _windows_of_pass(self, rank: int, epoch: int, number: int) -> Iterator[Window]:
        if not self.shuffle:
            return self._in_order(rank)
        if self.total_rows <= self.window_rows:
            return self._permuted(rank, epoch, number)
        return self._by_shard(rank, epoch, number)

    def _in_order(self, rank: int) -> Iterator[Window]:
        sequence = _Sequence(self.block_rows, np.arange(len(self.block_rows)))
        for step in range(self._steps_per_pass()):
            offset, rows, global_rows = self._step(rank, step)
            start = step * self.size * self.batch_size + offset
            yield Window(sequence.pieces(start, start + rows), None, (rows,), (global_rows,))

    def _permuted(self, rank: int, epoch: int, number: int) -> Iterator[Window]:
        order = self._random(_ROW_ORDER, epoch, number).permutation(self.total_rows)
        steps = [self._step(rank, step) for step in range(self._steps_per_pass())]
        starts = [step * self.size * self.batch_size + offset for step, (offset, _, _) in enumerate(steps)]
        mine = [order[start : start + rows] for start, (_, rows, _) in zip(starts, steps, strict=True)]
        pieces = tuple(Piece(block, 0, rows) for block, rows in enumerate(self.block_rows) if rows)
        yield Window(pieces, np.concatenate(mine), tuple(s[1] for s in steps), tuple(s[2] for s in steps))

    def _by_shard(self, rank: int, epoch: int, number: int) -> Iterator[Window]:
        blocks = self._random(_BLOCK_ORDER, epoch, number).permutation(len(self.block_rows))
        sequence = _Sequence(self.block_rows, blocks)
        last = self._steps_per_pass() - 1
        start = rank * last * self.batch_size + self._step(rank, last)[0]
        # Windows end where steps end, so that no batch needs two of them.
        stride = max(1, self.window_rows // self.batch_size)
        for index, first in enumerate(range(0, last + 1, stride)):
            steps = [self._step(rank, step) for step in range(first, min(first + stride, last + 1))]
            rows = sum(step[1] for step in steps)
            order = self._random(_WINDOW_ORDER, epoch, number, rank, index).permutation(rows)
            pieces = sequence.pieces(start, start + rows)
            yield Window(pieces, order, tuple(s[1] for s in steps), tuple(s[2] for s in steps))
            start += rows

    def _random(self, purpose: int, epoch: int, number: int, rank: int = 0, window: int = 0) -> np.random.Generator:
        key = (purpose, epoch, number, rank, window)
        return np.random.default_rng(np.random.SeedSequence(self.seed % 2**64, spawn_key=key))


class _Sequence:
    """All rows, with the blocks in some order."""

    def __init__(self, block_rows: tuple[int, ...], blocks: npt.NDArray[np.integer]) -> None:
        self._blocks = blocks
        self._ends = np.cumsum(np.asarray(block_rows, np.int64)[blocks])

    def pieces(self, start: int, stop: int) -> tuple[Piece, ...]:
        """The parts of blocks that make up the rows ``start`` to ``stop`` (exclusive) of the sequence."""
        found = []
        place = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begin = int(self._ends[place - 1]) if place else 0
            end = min(int(self._ends[place]), stop)
            if end > start:
                found.append(Piece(int(self._blocks[place]), start - begin, end - begin))
            start, place = max(start, end), place + 1
        return tuple(found)
