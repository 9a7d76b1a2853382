"""Keep the files of a model usable after the removal of the Pipeline's folder that the model was loaded from.

Spark ML overwrites a Pipeline by removing its folder first and then asking each stage to write itself. A model that was
loaded from that folder would have nothing left to write, so its files are retained when it is loaded: small files in
memory, large files as memory maps. A mapped local file costs nothing and stays readable after it is unlinked; other
files are copied to an unnamed temporary file.
"""

from __future__ import annotations

import io
import mmap
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Literal, cast

from sparkhvd.errors import StoreError
from sparkhvd.estimators.training.job_files import PIECE_BYTES, StoredFile
from sparkhvd.store import Store

# The folders in which Spark ML's writers put the models that belong to another model.
_PARTS = frozenset({"stages", "bestModel", "subModels"})
# Smaller files are read into memory: a mapped file takes a descriptor, and a search may load hundreds of models.
_SMALL_BYTES = 4 << 20


class RetainedFiles:
    """The content of files at the time they were loaded; a copy in another process reads their current content.

    Args:
        store: the Store of the files.
        files: the files to retain.
    """

    def __init__(self, store: Store, files: Sequence[StoredFile]) -> None:
        self.url = store.url
        self._store = store
        self._contents = {file.path: _retain(store, file.path) for file in files}

    def open(self, path: str, mode: Literal["rb"]) -> BinaryIO:
        """Open a file for reading.

        Raises:
            StoreError: the file has changed in place, or this process does not retain it and it no longer exists.
        """
        content = self._contents.get(path)
        if content is None:
            return self._store.open(path, mode)
        if isinstance(content, bytes):
            return io.BytesIO(content)
        if content.size() != len(content):  # reading a truncated mapping would kill the process
            raise StoreError(
                f"{self.url}/{path} has been changed in place since the model was loaded. Load the model again."
            )
        return cast("BinaryIO", io.BufferedReader(_MapReader(content)))

    def __getstate__(self) -> dict[str, object]:
        """Leave the contents out, because memory maps cannot leave the process."""
        return {**self.__dict__, "_contents": {}}


def is_pipeline_part(url: str) -> bool:
    """Return whether a model's folder belongs to a Pipeline or another composite object of Spark ML."""
    return not _PARTS.isdisjoint(url.split("/"))


class _MapReader(io.RawIOBase):
    def __init__(self, content: mmap.mmap) -> None:
        super().__init__()
        self._content = content
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._content[self._position : self._position + len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


def _retain(store: Store, path: str) -> bytes | mmap.mmap:
    from pyarrow import fs  # noqa: PLC0415  (heavy)

    with store.open(path, "rb") as source:
        start = source.read(_SMALL_BYTES)
        if len(start) < _SMALL_BYTES:
            return start
        source.seek(0)
        if isinstance(store.arrow(path)[0], fs.LocalFileSystem):
            with suppress(OSError):  # some file systems do not support memory maps
                return _map_file(source)
        with tempfile.TemporaryFile(prefix="sparkhvd-spare-") as copy:
            shutil.copyfileobj(source, copy, PIECE_BYTES)
            copy.flush()
            return _map_file(cast("BinaryIO", copy))


def _map_file(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
