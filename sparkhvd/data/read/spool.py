"""Passes rows from a Spark task to its rank through unnamed Arrow files on the executor's disk.

The task writes the files while its worker process starts and imports. The files have no names, so the worker opens them
by the file descriptors of the task's process. However the task and the worker end, the disk space is free once both
have exited.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING

from sparkhvd.errors import StoreError

if TYPE_CHECKING:
    import pyarrow as pa


class Spool:
    """Writes Arrow batches into one file per value of a column.

    Args:
        folders: folders for the files; the first that can be written to is used.
        by: the column whose value selects the file of a row; it is not written.
        otherwise: the name of the file for batches without that column.
    """

    def __init__(self, folders: Sequence[str], by: str, otherwise: str) -> None:
        self._folders = folders
        self._by = by
        self._otherwise = otherwise
        self._writers: dict[str, pa.RecordBatchFileWriter] = {}
        self._writer_stack = ExitStack()
        self._files: dict[str, IO[bytes]] = {}
        self._file_stack = ExitStack()

    def write(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch.

        Raises:
            StoreError: none of the folders can be written to, or the disk is full or fails.
        """
        for part, rows in self._parts(batch):
            if rows.num_rows:
                try:
                    self._writer(part, rows.schema).write_batch(rows)
                except OSError as error:
                    raise self._failed(error) from error

    def finish(self) -> dict[str, str]:
        """Complete the files, and return their paths by the column's values, for this user's processes on this machine.

        Raises:
            StoreError: the disk is full or fails.
        """
        try:
            self._writer_stack.close()
        except OSError as error:
            raise self._failed(error) from error
        return {part: f"/proc/{os.getpid()}/fd/{file.fileno()}" for part, file in self._files.items()}

    def close(self) -> None:
        """Close the files, which deletes them when no other process has them open."""
        self._file_stack.close()

    def _parts(self, batch: pa.RecordBatch) -> Iterable[tuple[str, pa.RecordBatch]]:
        import pyarrow.compute as pc  # noqa: PLC0415  (heavy)

        if self._by not in batch.schema.names:
            yield self._otherwise, batch
            return
        values = batch.column(self._by)
        rows = batch.select([name for name in batch.schema.names if name != self._by])
        parts = pc.unique(values).to_pylist()
        for part in parts:
            yield str(part), rows if len(parts) == 1 else rows.filter(pc.equal(values, part))

    def _writer(self, part: str, schema: pa.Schema) -> pa.RecordBatchFileWriter:
        import pyarrow as pa  # noqa: PLC0415

        if part not in self._writers:
            file = self._file_stack.enter_context(self._file())
            self._files[part] = file
            # Arrow's own file object is faster than Python's.
            sink = self._writer_stack.enter_context(pa.OSFile(f"/proc/self/fd/{file.fileno()}", "wb"))
            self._writers[part] = self._writer_stack.enter_context(pa.ipc.new_file(sink, schema))
        return self._writers[part]

    def _file(self) -> IO[bytes]:
        try:
            return unnamed_file(self._folders)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> StoreError:
        return StoreError(
            f"could not write its rows to the local disk ({', '.join(self._folders)}): {error.strerror or error}. Give "
            "the executors more local disk (spark.local.dir), more executors, or train through a Store (data='store')"
        )


def unnamed_file(folders: Sequence[str]) -> IO[bytes]:
    """Create an unnamed file in the first of the folders that can be written to.

    Raises:
        OSError: none of them can be written to; the error of the first.
    """
    problem: OSError | None = None
    for folder in folders:
        try:
            return tempfile.TemporaryFile(dir=folder)
        except OSError as error:
            problem = problem or error
    raise problem or OSError("there is no local folder to use")
