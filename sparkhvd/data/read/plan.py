"""Plans which rows a rank reads in which step, as a pure function of integers that every rank computes for itself.

Every rank has a shard of the rows; the sizes of shards of shared blocks differ by at most one row. Without ``shuffle``,
rank ``r`` has the ``r``-th contiguous part of the dataset. With ``shuffle``, every epoch has new shards, and each is a
fair sample of the dataset whatever its order: neighboring parts of the dataset go to different ranks and windows, at
random. Shuffled shards are chosen in one of three ways:

- Rows that fit into one window are read by every rank, each block once. A rank takes its share in runs of rows.
- Other rows are assigned by whole blocks, so that a rank decodes its shard only. Blocks are cut if there would be
  fewer than ``shards.SLICES`` per rank.
- Rows that only one rank can read (one partition per rank) stay there, and are read in small slices.

With batch size ``B``, the batch of step ``s`` has the rows ``s * B`` to ``(s + 1) * B`` of the shard, as far as they
exist. So on every rank a pass has as many steps as the largest shard needs, and every row appears exactly once. With
``shuffle``, the rows of a shard are permuted within windows. A window is the part of the shard that a rank holds in
memory to shuffle it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, count, pairwise

import numpy as np
import numpy.typing as npt

from sparkhvd.data.read.shards import (
    DRAW_BY_ALL,
    WINDOW_ORDER,
    Draw,
    Piece,
    Pieces,
    Shards,
    SharedBlocks,
    joined_pieces,
)
from sparkhvd.data.read.stratified import in_portions, part_in_portions
from sparkhvd.errors import ConfigError

RowIds = npt.NDArray[np.int64]

# The version of the rules for shuffling: an interrupted epoch resumes only under the same rules.
_RULES = 2

# The rows that are permuted together. They fit into a processor's cache, so the permutation is several times faster.
PORTION_ROWS = 128 * 1024


@dataclass(frozen=True)
class Window:
    """The rows that a rank reads at once, and the steps that use them.

    Attributes:
        pieces: the pieces to read, in this order.
        order: the indices, among the rows of ``pieces``, of the rows to deliver; None delivers all in reading order.
        rows: this rank's rows in each step of the window.
        global_rows: the rows of all ranks in each of these steps.
        portion: the number of steps whose rows are picked together.
    """

    pieces: tuple[Piece, ...]
    order: RowIds | None
    rows: tuple[int, ...]
    global_rows: tuple[int, ...]
    portion: int = 1

    def first(self, steps: int) -> Window:
        """Return the same window, ending after ``steps`` steps."""
        return replace(self, rows=self.rows[:steps], global_rows=self.global_rows[:steps])

    def after(self, steps: int) -> Window:
        """Return the same window without its first ``steps`` steps."""
        order = np.arange(sum(self.rows)) if self.order is None else self.order
        return replace(
            self, order=order[sum(self.rows[:steps]) :], rows=self.rows[steps:], global_rows=self.global_rows[steps:]
        )


@dataclass(frozen=True)
class Plan:
    """The division of a split's rows into steps and ranks; the module's docstring states the rules.

    Attributes:
        shards: the rows of every rank.
        batch_size: rows of one rank in a full step.
        seed: determines the order if ``shuffle`` is set.
        shuffle: whether every epoch has its own order; otherwise rows come in dataset order.
        window_rows: rows that a rank may hold in memory to shuffle them.
        steps_per_epoch: None means one pass over the rows. Fewer steps omit the pass's last rows (without shuffling,
            the same ones in every epoch). More steps continue with further passes, each with its own order.
        pair_last_row: whether a last batch of a single row takes a second row from the batch before it, because batch
            normalization cannot train on a single row.

    Raises:
        ConfigError: there are no rows, or a number is too small.
    """

    shards: Shards
    batch_size: int
    seed: int
    shuffle: bool
    window_rows: int
    steps_per_epoch: int | None = None
    pair_last_row: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "window_rows", "steps_per_epoch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        if self.total_rows < 1:
            raise ConfigError("There are no rows to plan for; prepare a dataset with at least one row.")

    @cached_property
    def total_rows(self) -> int:
        """Return the number of rows of the split over all ranks."""
        return sum(self.shards.rows)

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.shards.rows)

    def order(self) -> tuple[bool | int | str, ...]:
        """Return the values that determine the order of rows besides seed, ranks and batch size."""
        paired = ("paired",) if self.pair_last_row else ()
        if not self.shuffle:
            return (False, *paired)
        return (_RULES, isinstance(self.shards, SharedBlocks) and self.shards.keep, self.window_rows, *paired)

    def steps(self) -> int:
        """Return the number of steps per epoch, the same on every rank and in every epoch."""
        return self.steps_per_epoch or self._steps_per_pass

    def rows_in(self, rank: int, step: int) -> int:
        """Return the number of rows that a rank has in a step; it is the same in every epoch."""
        return self._rows(self.shards.rows[rank], step % self._steps_per_pass)

    def has_single_row(self) -> bool:
        """Return whether some rank has a batch of exactly one row."""
        return any(
            self._rows(shard, step) == 1
            for shard in self._sizes
            for step in range(max(0, shard // self.batch_size - 1), min(self._steps_per_pass, self.steps()))
        )

    @property
    def read_by_all(self) -> bool:
        """Return whether every rank reads all rows and takes its share of them."""
        return self.shuffle and self.shards.read_by_all(self.window_rows)

    def shard(self, rank: int) -> tuple[Piece, ...]:
        """Return the pieces of a rank that reads the same rows in every epoch."""
        return tuple(joined_pieces(sorted(self._read(rank, Draw(self.seed, 0, 0)), key=Piece.sort_key)))

    def pieces(self, rank: int, epoch: int, first_step: int = 0) -> Iterator[Piece]:
        """Return the pieces of ``windows`` in the same order; neighbors within a block are joined."""
        windows = self._windows(rank, epoch, first_step, ordered=False)
        return joined_pieces(chain.from_iterable(window.pieces for window in windows))

    def windows(self, rank: int, epoch: int, first_step: int = 0) -> Iterator[Window]:
        """Return the windows of ``rank`` in ``epoch``.

        Args:
            rank: the rank.
            epoch: from 0.
            first_step: the first step to return; it and later steps are the same as in the whole epoch.
        """
        return self._windows(rank, epoch, first_step, ordered=True)

    def global_batches(self, epoch: int) -> Iterator[list[RowIds]]:
        """Yield the row ids of every rank in each step of ``epoch``, in the order in which the rank delivers them.

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

    @property
    def _portion(self) -> int:
        return max(1, PORTION_ROWS // self.batch_size)

    @cached_property
    def _sizes(self) -> Counter[int]:
        return Counter(self.shards.rows)

    def _rows(self, shard: int, step: int) -> int:
        """Return the number of rows in one step of a shard with this number of rows."""
        return self._rows_before(shard, step + 1) - self._rows_before(shard, step)

    def _rows_before(self, shard: int, step: int) -> int:
        """Return the number of rows before this step of a shard with this number of rows."""
        full, rest = divmod(shard, self.batch_size)
        starts_early = self.pair_last_row and self.batch_size > 2 and full > 0 and rest == 1 and step == full
        return min(step * self.batch_size, shard) - starts_early

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
        sequence, stride = Pieces(self._read(rank, draw)), self._stride
        shard = self.shards.rows[rank]
        for index in range(skipped // stride, -(-self._steps_per_pass // stride)):
            steps = range(index * stride, min((index + 1) * stride, self._steps_per_pass))
            rows = tuple(self._rows(shard, step) for step in steps)
            start = self._rows_before(shard, steps.start)
            pieces = self.shards.whole if self.read_by_all else sequence.between(start, start + sum(rows))
            order = self._order(rank, draw, index, sum(rows)) if self.shuffle and ordered else None
            global_rows = tuple(self._global_rows(step) for step in steps)
            window = Window(pieces, order, rows, global_rows, self._portion)
            yield window.after(skipped - steps.start) if skipped > steps.start else window

    def _read(self, rank: int, draw: Draw) -> tuple[Piece, ...]:
        if self.read_by_all:
            return self.shards.whole
        return self.shards.pieces(rank, draw if self.shuffle else None, self._stride * self.batch_size)

    @cached_property
    def _stride(self) -> int:
        """Return the number of steps in a window. A window ends with a step, so no batch spans two windows."""
        if self.read_by_all:
            return self._steps_per_pass
        windows = -(-self._steps_per_pass // max(1, self.window_rows // self.batch_size))
        return -(-self._steps_per_pass // windows)

    def _order(self, rank: int, draw: Draw, window: int, rows: int) -> RowIds:
        random, portion = draw.random(WINDOW_ORDER, rank, window), self._portion * self.batch_size
        if not self.read_by_all:
            return in_portions(rows, portion, random)
        return part_in_portions(self.shards.rows, rank, portion, draw.random(DRAW_BY_ALL), random)
