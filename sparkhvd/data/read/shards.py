"""Assigns pieces of blocks to ranks, as a pure function of integers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from sparkhvd.data.read.stratified import spread
from sparkhvd.errors import ConfigError

# The purpose of a random stream. It is part of the seed, so that two purposes never share numbers.
SEQUENCE, WINDOW_ORDER, SHARD_ORDER, DRAW_BY_ALL = range(4)

# The smallest number of parts of a shard. By default, as many row groups are prepared for every rank.
SLICES = 10
# Parts of a window for rows that can be read from any position.
_FREE_SLICES = 32


@dataclass(frozen=True)
class Piece:
    """The rows ``start`` to ``stop`` (exclusive) of one block."""

    block: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    def sort_key(self) -> tuple[int, int]:
        """Return the sort key for pieces in the order of the dataset."""
        return self.block, self.start


@dataclass(frozen=True)
class Draw:
    """The source of random numbers for one pass over the rows: the seed, the epoch and the pass within the epoch."""

    seed: int
    epoch: int
    number: int

    def random(self, purpose: int, rank: int = 0, window: int = 0) -> np.random.Generator:
        """Return the generator for one purpose."""
        key = (purpose, self.epoch, self.number, rank, window)
        return np.random.default_rng(np.random.SeedSequence(self.seed % 2**64, spawn_key=key))


class Shards(Protocol):
    """The assignment of rows to ranks."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Return the number of rows of every rank."""

    @property
    def whole(self) -> tuple[Piece, ...]:
        """Return all blocks that a rank can read, in their order."""

    def read_by_all(self, window_rows: int) -> bool:
        """Return whether every rank reads all rows, and takes its share within its only window."""

    def pieces(self, rank: int, draw: Draw | None, window_rows: int) -> tuple[Piece, ...]:
        """Return the pieces of a rank, window by window; without ``draw`` in dataset order."""


@dataclass(frozen=True)
class SharedBlocks:
    """Blocks that every rank can read.

    Attributes:
        block_rows: rows of every block (row group), in row order.
        size: number of ranks.
        keep: whether a rank reads the same rows in every epoch, for a cache; their order still changes.
    """

    block_rows: tuple[int, ...]
    size: int
    keep: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size is {self.size}; it must be at least 1.")
        for block, rows in enumerate(self.block_rows):
            if rows < 0:
                raise ConfigError(f"Block {block} has a negative row count ({rows}). Prepare the dataset again.")

    @cached_property
    def rows(self) -> tuple[int, ...]:
        rows, remainder = divmod(self._total, self.size)
        return tuple(rows + (rank < remainder) for rank in range(self.size))

    def read_by_all(self, window_rows: int) -> bool:
        return self._total <= window_rows

    def pieces(self, rank: int, draw: Draw | None, window_rows: int) -> tuple[Piece, ...]:
        start = sum(self.rows[:rank])
        if draw is None:
            return Pieces(self.whole).between(start, start + self.rows[rank])
        has_few_blocks = len(self.whole) < SLICES * self.size
        slices = _cut(self.block_rows, -(-self._total // (SLICES * self.size))) if has_few_blocks else self.whole
        assignment = Draw(draw.seed, 0, 0) if self.keep else draw
        order = spread(len(slices), self.size, assignment.random(SEQUENCE))
        shard = Pieces([slices[index] for index in order]).between(start, start + self.rows[rank])
        return _windowed(shard, draw, rank, window_rows, cut=self.keep)

    @cached_property
    def whole(self) -> tuple[Piece, ...]:
        return _cut(self.block_rows)

    @cached_property
    def _total(self) -> int:
        return sum(self.block_rows)


@dataclass(frozen=True)
class OwnBlocks:
    """Blocks that only one rank can read.

    Attributes:
        block_rows: rows of this rank's blocks.
        rows: the rows of every rank.
    """

    block_rows: tuple[int, ...]
    rows: tuple[int, ...]

    @cached_property
    def whole(self) -> tuple[Piece, ...]:
        return _cut(self.block_rows)

    def read_by_all(self, window_rows: int) -> bool:  # noqa: ARG002
        return False

    def pieces(self, rank: int, draw: Draw | None, window_rows: int) -> tuple[Piece, ...]:
        return self.whole if draw is None else _windowed(self.whole, draw, rank, window_rows, cut=True)


def _cut(block_rows: Sequence[int], most: int | None = None) -> tuple[Piece, ...]:
    """Return all rows in order, in pieces of at most ``most`` rows and of almost equal size within a block."""
    pieces = []
    for block, rows in enumerate(block_rows):
        parts = min(rows, 1) if most is None else -(-rows // most)
        pieces += [Piece(block, rows * at // parts, rows * (at + 1) // parts) for at in range(parts)]
    return tuple(pieces)


def _windowed(pieces: Sequence[Piece], draw: Draw, rank: int, window_rows: int, *, cut: bool) -> tuple[Piece, ...]:
    """Order the pieces of a shard so that every window is a fair sample; ``cut`` them if that costs nothing."""
    pieces = sorted(pieces, key=Piece.sort_key)
    if cut:
        most = max(1, window_rows // _FREE_SLICES)
        pieces = [
            Piece(piece.block, piece.start + part.start, piece.start + part.stop)
            for piece in pieces
            for part in _cut([piece.rows], most)
        ]
    windows = -(-sum(piece.rows for piece in pieces) // window_rows)
    order = spread(len(pieces), max(1, windows), draw.random(SHARD_ORDER, rank))
    return tuple(pieces[index] for index in order)


def joined_pieces(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the same rows in the same order, with neighboring pieces of a block joined."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None and (last.block, last.stop) == (piece.block, piece.start):
            last = replace(last, stop=piece.stop)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


class Pieces:
    """The concatenated rows of some pieces."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._ends = np.cumsum([piece.rows for piece in pieces], dtype=np.int64)

    def between(self, start: int, stop: int) -> tuple[Piece, ...]:
        """Return the parts of pieces that make up the rows ``start`` to ``stop`` (exclusive)."""
        pieces = []
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            piece = self._pieces[index]
            begin = int(self._ends[index]) - piece.rows
            end = min(begin + piece.rows, stop)
            if end > start:
                pieces.append(Piece(piece.block, piece.start + start - begin, piece.start + end - begin))
            start, index = max(start, end), index + 1
        return tuple(pieces)
