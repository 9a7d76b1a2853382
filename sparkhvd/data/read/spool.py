"""The rows that a Spark task hands to its rank: Arrow files without a name on the executor's disk.

The task writes them while its worker starts and imports, and tells the worker where they are: the files have no names,
so the way to them leads through the open files of the task's process. Whatever ends task or worker, the disk space is
free as soon as both are gone.
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
        folders: where the files may lie; the first that takes one is used.
        by: the column that says into which file a row goes, and that is not written itself; rows without it go into the
            file of ``otherwise``.
        otherwise: see ``by``.

    Raises:
        StoreError: none of the folders takes a file.
    """

    def __init__(self, folders: Sequence[str], by: str, otherwise: str) -> None:
        self._folders = folders
        self._by = by
        self._otherwise = otherwise
        self._writers: dict[str, pa.RecordBatchFileWriter] = {}
        self._closing = ExitStack()  # the writers
        self._files: dict[str, IO[bytes]] = {}
        self._owned = ExitStack()  # the files

    def write(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch.

        Raises:
            StoreError: the disk does not take them.
        """
        for part, rows in self._parts(batch):
            if rows.num_rows:
                try:
                    self._writer(part, rows.schema).write_batch(rows)
                except OSError as error:
                    raise self._failed(error) from error

    def finish(self) -> dict[str, str]:
        """Complete the files; their paths, for processes of this user on this machine, by the column's values."""
        try:
            self._closing.close()
        except OSError as error:
            raise self._failed(error) from error
        return {part: f"/proc/{os.getpid()}/fd/{file.fileno()}" for part, file in self._files.items()}

    def close(self) -> None:
        """Give the files up."""
        self._owned.close()

    def _parts(self, batch: pa.RecordBatch) -> Iterable[tuple[str, pa.RecordBatch]]:
        import pyarrow.compute as pc  # noqa: PLC0415  (heavy)

        if self._by not in batch.schema.names:
            yield self._otherwise, batch
            return
        values = batch.column(self._by)
        rows = batch.drop_columns([self._by])
        parts = pc.unique(values).to_pylist()
        for part in parts:
            yield str(part), rows if len(parts) == 1 else rows.filter(pc.equal(values, part))

    def _writer(self, part: str, schema: pa.Schema) -> pa.RecordBatchFileWriter:
        import pyarrow as pa  # noqa: PLC0415

        if part not in self._writers:
            file = self._owned.enter_context(self._file())
            self._files[part] = file
            # Arrow's own file is not slowed down by Python's.
            sink = self._closing.enter_context(pa.OSFile(f"/proc/self/fd/{file.fileno()}", "wb"))
            self._writers[part] = self._closing.enter_context(pa.ipc.new_file(sink, schema))
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
    """A new file without a name in the first of the folders that takes one.

    Raises:
        OSError: none of them does; that of the first.
    """
    problem: OSError | None = None
    for folder in folders:
        try:
            return tempfile.TemporaryFile(dir=folder)
        except OSError as error:
            problem = problem or error
    raise problem or OSError("there is no local folder to use")
