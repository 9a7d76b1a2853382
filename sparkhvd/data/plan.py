"""Which rows a rank reads in which step: a pure function of integers that every rank computes for itself.

Every rank has a shard of the rows. Of rows that all ranks can read, rank ``r`` has the ``r``-th contiguous part of the
blocks' sequence, cut by rows, so that the shards' sizes differ by at most one. With ``shuffle`` the sequence is another
one in every epoch: the blocks are permuted, and where it begins is drawn. Without, it is the dataset's own order.
Either way a rank decodes its own part only. Rows that were dealt out before (one partition per rank) stay there.

In step ``s`` a rank has the rows ``s * B`` to ``(s + 1) * B`` of its shard, as far as there are any, so a pass has as
many steps as the largest shard needs, on every rank. Every row comes exactly once. With ``shuffle`` the rows of a shard
are permuted window by window: a window is what a rank holds in memory to mix it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, count, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sparkhvd.errors import ConfigError

RowIds = npt.NDArray[np.int64]

# What a random stream is for; part of its seed, so that two purposes never share numbers.
_SEQUENCE, _WINDOW_ORDER, _SHARD_ORDER = range(3)


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

    def after(self, steps: int) -> Window:
        """The same window without its first ``steps`` steps."""
        order = np.arange(sum(self.rows)) if self.order is None else self.order
        return replace(
            self, order=order[sum(self.rows[:steps]) :], rows=self.rows[steps:], global_rows=self.global_rows[steps:]
        )


@dataclass(frozen=True)
class Draw:
    """The random numbers of one pass over the rows: which seed, which epoch, which pass of it."""

    seed: int
    epoch: int
    number: int

    def random(self, purpose: int, rank: int = 0, window: int = 0) -> np.random.Generator:
        """A generator of its own for every purpose."""
        key = (purpose, self.epoch, self.number, rank, window)
        return np.random.default_rng(np.random.SeedSequence(self.seed % 2**64, spawn_key=key))


class Shards(Protocol):
    """Who has which rows."""

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of every rank."""

    def pieces(self, rank: int, draw: Draw | None) -> tuple[Piece, ...]:
        """A rank's rows, in the order of reading; without ``draw`` that is the order in which they lie."""


@dataclass(frozen=True)
class SharedBlocks:
    """Blocks that every rank can read.

    Attributes:
        block_rows: rows of every block (row group), in row order.
        size: number of ranks.
        keep: whether a rank has the same rows in every epoch, to keep them near it; their order still changes.
    """

    block_rows: tuple[int, ...]
    size: int
    keep: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size is {self.size}; it must be at least 1.")
        if min(self.block_rows, default=0) < 0:
            raise ConfigError("A block with less than no rows cannot be planned for; prepare the dataset again.")

    @cached_property
    def rows(self) -> tuple[int, ...]:
        each, remainder = divmod(sum(self.block_rows), self.size)
        return tuple(each + (rank < remainder) for rank in range(self.size))

    def pieces(self, rank: int, draw: Draw | None) -> tuple[Piece, ...]:
        blocks = np.arange(len(self.block_rows))
        start = sum(self.rows[:rank])
        if draw is None:
            return self._sequence(blocks).between(start, start + self.rows[rank])
        dealing = Draw(draw.seed, 0, 0) if self.keep else draw
        random = dealing.random(_SEQUENCE)
        sequence = self._sequence(random.permutation(blocks))
        total = sum(self.block_rows)
        # The sequence ends and begins again where a block does, so no rank comes back to one, but to an only one.
        start += int(random.integers(total)) if self.size > 1 else 0
        stop = start + self.rows[rank]
        found = (
            *sequence.between(min(start, total), min(stop, total)),
            *sequence.between(max(start - total, 0), max(stop - total, 0)),
        )
        return _permuted(found, draw, rank) if self.keep else found

    def _sequence(self, blocks: npt.NDArray[np.integer]) -> _Pieces:
        return _Pieces([Piece(int(block), 0, self.block_rows[block]) for block in blocks])


@dataclass(frozen=True)
class OwnBlocks:
    """Blocks that one rank was given; the others cannot read them.

    Attributes:
        block_rows: rows of this rank's blocks.
        rows: the rows of every rank.
    """

    block_rows: tuple[int, ...]
    rows: tuple[int, ...]

    def pieces(self, rank: int, draw: Draw | None) -> tuple[Piece, ...]:
        found = tuple(Piece(block, 0, rows) for block, rows in enumerate(self.block_rows) if rows)
        return found if draw is None else _permuted(found, draw, rank)


@dataclass(frozen=True)
class Plan:
    """The division of a split's rows into steps and ranks; the module's text states the rules.

    Attributes:
        shards: who has which rows.
        batch_size: rows of one rank in a full step.
        seed: decides the order where ``shuffle`` is set.
        shuffle: whether every epoch has an order of its own; otherwise rows come as they lie.
        window_rows: rows that a rank may hold in memory to shuffle them.
        steps_per_epoch: None means one pass over the rows. Fewer steps leave out the pass's last rows (without
            shuffling the same ones in every epoch), more go on with further passes, each with an order of its own.

    Raises:
        ConfigError: there are no rows, or a number is too small.
    """

    shards: Shards
    batch_size: int
    seed: int
    shuffle: bool
    window_rows: int
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "window_rows", "steps_per_epoch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        if self.total_rows < 1:
            raise ConfigError("There are no rows to plan for; prepare a dataset with at least one row.")

    @cached_property
    def total_rows(self) -> int:
        """Rows of the split over all ranks."""
        return sum(self.shards.rows)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.shards.rows)

    def order(self) -> tuple[bool | int, ...]:
        """What decides, besides seed, ranks and batch size, which rows come when."""
        if not self.shuffle:
            return (False,)
        return (True, isinstance(self.shards, SharedBlocks) and self.shards.keep, self.window_rows)

    def steps(self) -> int:
        """Steps per epoch, the same on every rank and in every epoch."""
        return self.steps_per_epoch or self._steps_per_pass

    def rows_in(self, rank: int, step: int) -> int:
        """The rows that a rank has in a step, in every epoch."""
        return self._rows(self.shards.rows[rank], step % self._steps_per_pass)

    def shard(self, rank: int) -> tuple[Piece, ...]:
        """All of a rank's rows, where it has the same ones in every epoch."""
        return self.shards.pieces(rank, Draw(self.seed, 0, 0) if self.shuffle else None)

    def pieces(self, rank: int, epoch: int, first_step: int = 0) -> Iterator[Piece]:
        """What ``windows`` will read, in the same order; neighbours within a block may be joined."""
        last: Piece | None = None
        for window in self._windows(rank, epoch, first_step, ordered=False):
            for piece in window.pieces:
                if last is not None and (last.block, last.stop) == (piece.block, piece.start):
                    last = replace(last, stop=piece.stop)
                    continue
                if last is not None:
                    yield last
                last = piece
        if last is not None:
            yield last

    def windows(self, rank: int, epoch: int, first_step: int = 0) -> Iterator[Window]:
        """What ``rank`` reads in ``epoch`` (from 0), window by window.

        Args:
            rank: whose rows.
            epoch: from 0.
            first_step: the steps before it are left out; the others are those of the whole epoch.
        """
        return self._windows(rank, epoch, first_step, ordered=True)

    def global_batches(self, epoch: int) -> Iterator[list[RowIds]]:
        """For every step of ``epoch``: the row ids of every rank, in the order that the rank delivers them.

        Row ids count the rows of shared blocks in dataset order, from 0. Their concatenation over the ranks is the
        global batch in the order that equals single-process training.
        """
        per_rank = [self._batches(rank, epoch) for rank in range(self.size)]
        for batches in zip(*per_rank, strict=True):
            yield list(batches)

    def _batches(self, rank: int, epoch: int) -> Iterator[RowIds]:
        blocks: Sequence[int] = self.shards.block_rows  # type: ignore[attr-defined]  # both kinds have them
        starts = [0, *accumulate(blocks)]
        for window in self.windows(rank, epoch):
            read = [np.arange(starts[p.block] + p.start, starts[p.block] + p.stop) for p in window.pieces]
            ids = np.concatenate(read) if read else np.empty(0, np.int64)
            ordered = ids if window.order is None else ids[window.order]
            for start, stop in pairwise([0, *accumulate(window.rows)]):
                yield ordered[start:stop]

    @cached_property
    def _steps_per_pass(self) -> int:
        return -(-max(self.shards.rows) // self.batch_size)

    @cached_property
    def _sizes(self) -> Counter[int]:
        return Counter(self.shards.rows)

    def _rows(self, shard: int, step: int) -> int:
        """The rows of one step that a shard of so many rows has."""
        return min(max(shard - step * self.batch_size, 0), self.batch_size)

    def _global_rows(self, step: int) -> int:
        return sum(ranks * self._rows(shard, step) for shard, ranks in self._sizes.items())

    def _windows(self, rank: int, epoch: int, first_step: int, *, ordered: bool) -> Iterator[Window]:
        left = self.steps() - first_step
        first_pass, skipped = divmod(first_step, self._steps_per_pass)
        for number in count(first_pass):
            for window in self._windows_of_pass(rank, Draw(self.seed, epoch, number), skipped, ordered=ordered):
                if left <= 0:
                    return
                yield window.first(left)
                left -= len(window.rows)
            skipped = 0
            if left <= 0:
                return

    def _windows_of_pass(self, rank: int, draw: Draw, skipped: int, *, ordered: bool) -> Iterator[Window]:
        sequence = _Pieces(self.shards.pieces(rank, draw if self.shuffle else None))
        shard = self.shards.rows[rank]
        # Windows end where steps end, so that no batch needs two of them.
        stride = max(1, self.window_rows // self.batch_size)
        for index in range(skipped // stride, -(-self._steps_per_pass // stride)):
            steps = range(index * stride, min((index + 1) * stride, self._steps_per_pass))
            rows = tuple(self._rows(shard, step) for step in steps)
            start = min(steps.start * self.batch_size, shard)
            order = None
            if self.shuffle and ordered:
                order = draw.random(_WINDOW_ORDER, rank, index).permutation(sum(rows))
            pieces = sequence.between(start, start + sum(rows))
            window = Window(pieces, order, rows, tuple(self._global_rows(step) for step in steps))
            yield window.after(skipped - steps.start) if skipped > steps.start else window


def _permuted(pieces: tuple[Piece, ...], draw: Draw, rank: int) -> tuple[Piece, ...]:
    return tuple(pieces[place] for place in draw.random(_SHARD_ORDER, rank).permutation(len(pieces)))


class _Pieces:
    """The rows of some pieces, one after the other."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._ends = np.cumsum([piece.rows for piece in pieces], dtype=np.int64)

    def between(self, start: int, stop: int) -> tuple[Piece, ...]:
        """The parts of pieces that make up the rows ``start`` to ``stop`` (exclusive)."""
        found = []
        place = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            piece = self._pieces[place]
            begin = int(self._ends[place]) - piece.rows
            end = min(begin + piece.rows, stop)
            if end > start:
                found.append(Piece(piece.block, piece.start + start - begin, piece.start + end - begin))
            start, place = max(start, end), place + 1
        return tuple(found)
