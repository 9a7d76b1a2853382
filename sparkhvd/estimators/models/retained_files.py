"""The files of a model that was loaded as part of something larger, after what holds them was removed.

Spark ML overwrites a Pipeline by removing its folder first, and then asks each stage to write itself: a model among
them that was loaded from there would have nothing left to write. So its files are held when it is loaded: small ones in
memory, large ones mapped. A mapped file of this machine costs nothing and stays readable without its name; others are
copied to one that never had any.
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

# The folders in which Spark ML's writers put the models that are parts of another.
_PARTS = frozenset({"stages", "bestModel", "subModels"})
# A mapped file takes a descriptor, and a search may bring hundreds of models.
_SMALL_BYTES = 4 << 20


class RetainedFiles:
    """Files of a Store as they were; in another process those that are there then.

    Args:
        store: where they are.
        files: which.
    """

    def __init__(self, store: Store, files: Sequence[StoredFile]) -> None:
        self.url = store.url
        self._store = store
        self._held = {file.path: _held(store, file.path) for file in files}

    def open(self, path: str, mode: Literal["rb"]) -> BinaryIO:
        """A file for reading.

        Raises:
            StoreError: it is another one now, or was there once and is not kept here.
        """
        found = self._held.get(path)
        if found is None:
            return self._store.open(path, mode)
        if isinstance(found, bytes):
            return io.BytesIO(found)
        if found.size() != len(found):  # reading what was cut off would end the process
            raise StoreError(f"{self.url}/{path} has been changed in place since the model was loaded; load it again.")
        return cast("BinaryIO", io.BufferedReader(_MapReader(found)))

    def __getstate__(self) -> dict[str, Any]:
        """Memory stays in its process."""
        return {**self.__dict__, "_held": {}}


def is_pipeline_part(url: str) -> bool:
    """Whether a model's folder is one within something larger of Spark ML's."""
    return not _PARTS.isdisjoint(url.split("/"))


class _MapReader(io.RawIOBase):
    def __init__(self, content: mmap.mmap) -> None:
        super().__init__()
        self._content = content
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._content[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def _held(store: Store, path: str) -> bytes | mmap.mmap:
    from pyarrow import fs  # noqa: PLC0415  (heavy)

    with store.open(path, "rb") as source:
        start = source.read(_SMALL_BYTES)
        if len(start) < _SMALL_BYTES:
            return start
        source.seek(0)
        if isinstance(store.arrow(path)[0], fs.LocalFileSystem):
            with suppress(OSError):  # some file systems map nothing
                return _map_of(source)
        with tempfile.TemporaryFile(prefix="sparkhvd-spare-") as copy:
            shutil.copyfileobj(source, copy, PIECE_BYTES)
            copy.flush()
            return _map_of(cast("BinaryIO", copy))


def _map_of(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
