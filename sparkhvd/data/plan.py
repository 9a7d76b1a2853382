"""Which rows a rank reads in which step: a pure function of integers that every rank computes for itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Plan:
    """The division of a split's rows into steps and ranks.

    Attributes:
        block_rows: rows of every block (row group), in row order.
        size: number of ranks.
        batch_size: rows of one rank in a full step; a global batch has ``size * batch_size`` rows.
        seed: decides the order where ``shuffle`` is set.
        shuffle: whether every epoch has an order of its own; otherwise rows come in dataset order.
        window_rows: rows that a rank may hold in memory to shuffle them.
        steps_per_epoch: None means one pass over the rows.
    """

    block_rows: tuple[int, ...]
    size: int
    batch_size: int
    seed: int
    shuffle: bool
    window_rows: int
    steps_per_epoch: int | None = None

    def steps(self) -> int:
        """Steps per epoch, the same on every rank and in every epoch."""
        raise NotImplementedError

    def global_batches(self, epoch: int) -> Iterator[list[npt.NDArray[np.int64]]]:
        """For every step of ``epoch``: the row ids of every rank, in the order that the rank delivers them.

        Row ids count the rows of the split in dataset order, from 0. Their concatenation over the ranks is the global
        batch in the order that equals single-process training.
        """
        raise NotImplementedError
