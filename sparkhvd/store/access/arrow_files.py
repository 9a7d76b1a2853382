"""An Arrow file system over a remote Store, which reads only the needed ranges of Parquet files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa
from pyarrow import fs

from sparkhvd.store.access.remote_file import RangeReader

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class _StoreHandler(fs.FSSpecHandler):  # type: ignore[misc]  # pyarrow is not typed
    """fsspec's file system for Arrow; its files are read with the retries and error messages of the Store."""

    def __init__(self, filesystem: AbstractFileSystem, open_reader: Callable[[str], RangeReader]) -> None:
        super().__init__(filesystem)
        self._open_reader = open_reader

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(self._open_reader(path), mode="r")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.open_input_file(path)


def arrow_filesystem(filesystem: AbstractFileSystem, open_reader: Callable[[str], RangeReader]) -> fs.FileSystem:
    """Return an Arrow file system over an fsspec file system.

    Args:
        filesystem: handles all operations on names.
        open_reader: opens a location for reading.
    """
    return fs.PyFileSystem(_StoreHandler(filesystem, open_reader))
