"""Caches for the rows that a rank has read: in memory, or in memory-mapped files on the executor's disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from sparkhvd.data.read.blocks import Blocks
from sparkhvd.data.read.shards import Piece
from sparkhvd.data.read.spool import unnamed_file
from sparkhvd.errors import StoreError

if TYPE_CHECKING:
    import pyarrow as pa

# Stores the batches of a piece, and returns them as stored.
Keep = Callable[[Iterator["pa.RecordBatch"]], Sequence["pa.RecordBatch"]]


class CachedBlocks:
    """Blocks that cache each piece on its first read.

    Args:
        blocks: the source of the rows.
        pieces: the pieces to cache; every requested piece must lie within one of them.
        keep: stores the rows of a piece.
        kept: the pieces in the cache; the owner passes the same dict in every epoch to keep using the cache.
    """

    fresh = False

    def __init__(
        self, blocks: Blocks, pieces: Sequence[Piece], keep: Keep, kept: dict[Piece, Sequence[pa.RecordBatch]]
    ) -> None:
        self._blocks = blocks
        self._pieces: dict[int, list[Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.block, []).append(piece)
        self._keep = keep
        self._kept = kept

    @property
    def where(self) -> str:
        return self._blocks.where

    def location(self, block: int) -> str:
        return self._blocks.location(block)

    def batches(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        whole = next(one for one in self._pieces[piece.block] if one.start <= piece.start and piece.stop <= one.stop)
        if whole not in self._kept:
            self._kept[whole] = self._keep(self._blocks.batches(whole))
        end = whole.start
        for batch in self._kept[whole]:
            begin, end = end, end + batch.num_rows
            first, stop = max(piece.start, begin), min(piece.stop, end)
            if first < stop:
                yield batch.slice(first - begin, stop - first)


def in_memory(batches: Iterator[pa.RecordBatch]) -> Sequence[pa.RecordBatch]:
    """Keep batches in memory."""
    return list(batches)


def on_disk(folders: Sequence[str]) -> Keep:
    """Return a function that stores batches in unnamed files, in the first folder that can be written to.

    The system deletes the files when this process ends, however it ends.
    """

    def keep(batches: Iterator[pa.RecordBatch]) -> Sequence[pa.RecordBatch]:
        import pyarrow as pa  # noqa: PLC0415  (heavy)

        first = next(batches, None)
        if first is None:
            return []
        try:
            with unnamed_file(folders) as file:
                with pa.ipc.new_stream(file, first.schema) as writer:
                    writer.write_batch(first)
                    for batch in batches:
                        writer.write_batch(batch)
                file.flush()
                # The mapping keeps the file's content alive until the last batch is freed. Unlike Python's, it needs no
                # file descriptor: a dataset may have more row groups than a process may open files.
                with pa.memory_map(f"/proc/self/fd/{file.fileno()}") as mapped:
                    content = mapped.read_buffer()
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"Cannot keep rows on the local disk in {', '.join(folders)}: {error.strerror or error}. Free "
                "some space there, set spark.local.dir to a larger disk, or train without the cache."
            ) from error
        return list(pa.ipc.open_stream(content))

    return keep
