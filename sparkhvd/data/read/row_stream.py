"""Regroups the rows of chunks."""

from __future__ import annotations

from collections.abc import Iterator

from sparkhvd._util.counts import counted
from sparkhvd.data.read.batches import Arrays
from sparkhvd.errors import DataError


class RowStream:
    """A stream of rows from chunks of any size."""

    def __init__(self, chunks: Iterator[Arrays]) -> None:
        self._chunks = chunks
        self._chunk: Arrays = {}
        self._at = self._end = 0  # the bounds of the chunk's remaining rows

    def parts(self, rows: int) -> Iterator[Arrays]:
        """Yield the next rows, in one part per chunk that contains them."""
        while rows > 0:
            if self._at == self._end:
                chunk = next(self._chunks, None)
                if chunk is None:
                    raise DataError(
                        f"The reader ended {counted(rows, 'row')} before the end of the plan. If the files changed "
                        "after the training began, train again, and leave them unchanged until it ends."
                    )
                self._chunk, self._at = chunk, 0
                self._end = len(next(iter(chunk.values())))
            stop = min(self._at + rows, self._end)
            part = {name: array[self._at : stop] for name, array in self._chunk.items()}
            rows -= stop - self._at
            self._at = stop
            yield part
