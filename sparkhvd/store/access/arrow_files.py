"""An Arrow file system over a remote Store, which reads only the needed ranges of Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import fs

from sparkhvd.store.access.remote_file import RangeReader

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class _StoreHandler(fs.FSSpecHandler):  # type: ignore[misc]  # pyarrow is not typed
    """fsspec's file system for Arrow; its files are read with the retries and error messages of the Store."""

    def __init__(
        self,
        filesystem: AbstractFileSystem,
        open_reader: Callable[[str], RangeReader],
        look_up: Callable[[str], Mapping[str, Any] | None],
    ) -> None:
        super().__init__(filesystem)
        self._open_reader = open_reader
        self._look_up = look_up

    def get_file_info(self, paths: Sequence[str]) -> list[fs.FileInfo]:
        return [self._file_info(path) for path in paths]

    def _file_info(self, path: str) -> fs.FileInfo:
        info = self._look_up(path)
        if info is None:
            return fs.FileInfo(path, fs.FileType.NotFound)
        return self._create_file_info(path, {**info, "mtime": _modified(info)})

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(self._open_reader(path), mode="r")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.open_input_file(path)


def arrow_filesystem(
    filesystem: AbstractFileSystem,
    open_reader: Callable[[str], RangeReader],
    look_up: Callable[[str], Mapping[str, Any] | None],
) -> fs.FileSystem:
    """Return an Arrow file system over an fsspec file system.

    Args:
        filesystem: handles all operations on names.
        open_reader: opens a location for reading.
        look_up: returns fsspec's facts about a location; None if nothing is there.
    """
    return fs.PyFileSystem(_StoreHandler(filesystem, open_reader, look_up))


def _modified(info: Mapping[str, Any]) -> datetime | float | None:
    """Return when a file was modified, or None; each of fsspec's file systems has its own name for it."""
    if "modification_time" in info:  # of HDFS, in milliseconds
        return float(info["modification_time"]) / 1000
    for name in ("mtime", "LastModified", "last_modified"):  # of S3 and ADLS
        if isinstance(time := info.get(name), datetime | int | float):
            return time
    return None
