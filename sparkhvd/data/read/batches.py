"""The batches that a reader yields, and the protocol of readers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sparkhvd.data.read.prefetch import StopSignal
from sparkhvd.data.schema.data_schema import DataSchema

Arrays = dict[str, npt.NDArray[np.generic]]


def first_row(rows: Arrays) -> Arrays:
    """Return a copy of the first row."""
    return {name: array[:1].copy() for name, array in rows.items()}


@dataclass(frozen=True)
class Batch:
    """The rows of one rank in one step.

    Attributes:
        columns: one contiguous, writable array per column, shape ``(rows, *column.shape)``; frameworks may alias it.
        rows: number of rows; 0 if this rank has none in the step.
        global_rows: rows of the step over all ranks, at least 1.
    """

    columns: Arrays
    rows: int
    global_rows: int

    @property
    def share(self) -> float:
        """Return this rank's part of the global batch; the shares of a step sum to 1."""
        return self.rows / self.global_rows


class BatchSource(Protocol):
    """The prepared rows of one split, as one rank sees them."""

    @property
    def schema(self) -> DataSchema: ...
    def steps(self) -> int:
        """Return the number of steps per epoch, the same on every rank and in every epoch."""

    def rows(self) -> int:
        """Return the number of rows of the split over all ranks."""

    def has_rows(self, step: int) -> bool:
        """Return whether this rank is certain to have rows in a step (from 0) of every epoch."""

    def epoch(self, number: int, first_step: int = 0, stop: StopSignal | None = None) -> Iterator[Batch]:
        """Yield the batches of epoch ``number`` (from 0), from a step on. Closing it ends the prefetching at once.

        ``stop`` ends it even while another thread waits for its next batch, which then raises ``StoppedError``.
        """
