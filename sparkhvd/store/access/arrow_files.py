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
        *,
        opens_with_info: bool,
    ) -> None:
        super().__init__(filesystem)
        self._opens_with_info = opens_with_info
        self._open_reader = open_reader
        self._look_up = look_up

    def get_file_info(self, paths: Sequence[str]) -> list[fs.FileInfo]:
        return [self._file_info(path) for path in paths]

    def _file_info(self, path: str) -> fs.FileInfo:
        info = self._look_up(path)
        return fs.FileInfo(path, fs.FileType.NotFound) if info is None else self._as_file_info(path, info)

    def _as_file_info(self, path: str, info: Mapping[str, Any]) -> fs.FileInfo:
        return self._create_file_info(path, {**info, "mtime": _modified(info)})

    def open_with_time(self, path: str) -> tuple[pa.NativeFile, int | None]:
        """See the function ``open_with_time``."""
        before = None if self._opens_with_info else self._file_info(path)
        reader = self._open_reader(path)
        if reader.info is not None:
            before = self._as_file_info(path, reader.info)
        return pa.PythonFile(reader, mode="r"), None if before is None else before.mtime_ns

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(self._open_reader(path), mode="r")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.open_input_file(path)


def arrow_filesystem(
    filesystem: AbstractFileSystem,
    open_reader: Callable[[str], RangeReader],
    look_up: Callable[[str], Mapping[str, Any] | None],
    *,
    opens_with_info: bool,
) -> fs.FileSystem:
    """Return an Arrow file system over an fsspec file system.

    Args:
        filesystem: handles all operations on names.
        open_reader: opens a location for reading.
        look_up: returns fsspec's facts about a location; None if nothing is there.
        opens_with_info: whether the readers know these facts.
    """
    return fs.PyFileSystem(_StoreHandler(filesystem, open_reader, look_up, opens_with_info=opens_with_info))


def open_with_time(filesystem: fs.FileSystem, path: str) -> tuple[pa.NativeFile, int | None]:
    """Open a file to read, and return when it was modified before that, in nanoseconds; None if that is not known.

    The file system of a Store asks for both in one request if it can.
    """
    if isinstance(filesystem, fs.PyFileSystem) and isinstance(filesystem.handler, _StoreHandler):
        return filesystem.handler.open_with_time(path)
    modified = filesystem.get_file_info(path).mtime_ns
    return filesystem.open_input_file(path), modified


def _modified(info: Mapping[str, Any]) -> datetime | float | None:
    """Return when a file was modified, or None; each of fsspec's file systems has its own name for it."""
    if "modification_time" in info:  # of HDFS, in milliseconds
        return float(info["modification_time"]) / 1000
    for name in ("mtime", "LastModified", "last_modified"):  # of S3 and ADLS
        if isinstance(time := info.get(name), datetime | int | float):
            return time
    return None
