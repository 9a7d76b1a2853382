"""A folder of a Store as petastorm's reader wants it: a file system of the kind that pyarrow had before version 15.

petastorm works with those alone; it fails with fsspec's, so it reads no S3 of its own accord. Here files are opened
through the Store, with its credentials, retries and messages, whatever its scheme.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    import pyarrow as pa

# petastorm takes the folder from a URL, and would use a local file system for this one if it were not given another.
URL = "file:///store"
_TOP = "/store"


def filesystem(store: Store, folder: str) -> Any:
    """The file system to hand to petastorm together with ``URL``.

    Args:
        store: where the files lie.
        folder: the folder in it that petastorm takes for everything there is.
    """
    # It asks by the type whether it is one of the old kind; only the old pyarrow that petastorm needs has that type.
    kind = import_module("pyarrow.filesystem").FileSystem
    return type("StoreFileSystem", (StoreFolder, kind), {})(store, folder)


class StoreFolder:
    """What petastorm and pyarrow ask of a file system while they read; all paths begin with ``/store``.

    Args:
        store: where the files lie.
        folder: the folder; what is in it is looked up once.
    """

    pathsep = "/"

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._files = {f"{_TOP}/{path.removeprefix(folder).lstrip('/')}": path for path in store.list(folder)}

    def isfile(self, path: str) -> bool:
        """Whether there is such a file."""
        return path in self._files

    def isdir(self, path: str) -> bool:
        """Whether files lie below the path."""
        return any(file.startswith(f"{path.rstrip('/')}/") for file in self._files)

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder."""
        return self.isfile(path) or self.isdir(path)

    def walk(self, path: str) -> Iterator[tuple[str, list[str], list[str]]]:
        """Folders with the names of the folders and files in them, from ``path`` downwards."""
        base = f"{path.rstrip('/')}/"
        inside = [file.removeprefix(base).partition("/") for file in self._files if file.startswith(base)]
        folders = sorted({name for name, deeper, _ in inside if deeper})
        yield path, folders, sorted(name for name, deeper, _ in inside if not deeper)
        for name in folders:
            yield from self.walk(f"{base}{name}")

    def open(self, path: str, mode: str = "rb") -> pa.NativeFile:
        """A file for reading."""
        if mode != "rb" or path not in self._files:
            raise FileNotFoundError(f"Cannot open {path} for reading in {self._store.url}: no such file.")
        files, place = self._store.arrow(self._files[path])
        return files.open_input_file(place)
