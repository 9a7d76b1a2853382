"""Presents a folder of a Store to petastorm's reader as a legacy pyarrow file system (before version 15).

petastorm works with legacy file systems only and fails with those of fsspec, so it cannot read S3 itself. This file
system opens files through a Store of any scheme, with its credentials, retries and messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    import pyarrow as pa

# petastorm takes the folder from a URL. With an explicit file system, it does not open the URL on the local disk.
URL = "file:///store"
_TOP = "/store"


def filesystem(store: Store, folder: str) -> Any:
    """Return the file system to pass to petastorm together with ``URL``.

    Args:
        store: the Store that contains the files.
        folder: the folder in it that petastorm sees as the root.
    """
    # petastorm checks for the legacy type, which exists only in the old pyarrow that petastorm needs.
    kind = import_module("pyarrow.filesystem").FileSystem
    return type("StoreFileSystem", (StoreFolder, kind), {})(store, folder)


class StoreFolder:
    """The methods of a file system that petastorm and pyarrow call to read; all paths begin with ``/store``.

    Args:
        store: the Store that contains the files.
        folder: the folder; its files are listed once.
    """

    pathsep = "/"

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._files = {f"{_TOP}/{path.removeprefix(folder).lstrip('/')}": path for path in store.list(folder)}

    def isfile(self, path: str) -> bool:
        """Return whether there is such a file."""
        return path in self._files

    def isdir(self, path: str) -> bool:
        """Return whether files lie below the path."""
        return any(file.startswith(f"{path.rstrip('/')}/") for file in self._files)

    def exists(self, path: str) -> bool:
        """Return whether there is a file or folder."""
        return self.isfile(path) or self.isdir(path)

    def walk(self, path: str) -> Iterator[tuple[str, list[str], list[str]]]:
        """Yield every folder from ``path`` downwards with the names of its folders and files."""
        base = f"{path.rstrip('/')}/"
        inside = [file.removeprefix(base).partition("/") for file in self._files if file.startswith(base)]
        folders = sorted({name for name, deeper, _ in inside if deeper})
        yield path, folders, sorted(name for name, deeper, _ in inside if not deeper)
        for name in folders:
            yield from self.walk(f"{base}{name}")

    def open(self, path: str, mode: str = "rb") -> pa.NativeFile:
        """Open a file for reading."""
        if mode != "rb" or path not in self._files:
            raise FileNotFoundError(f"Cannot open {path} for reading in {self._store.url}: no such file.")
        files, arrow_path = self._store.arrow(self._files[path])
        return files.open_input_file(arrow_path)
