"""Bytes that a job needs, on their way: small ones with the job, large ones as a file in the Store.

What is unpickled comes either with the job, whose way is authenticated, or from a file whose SHA-256 came with the job:
somebody who can write to the Store cannot make a rank or an executor run code.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparkhvd.errors import StoreError
from sparkhvd.store.protocol import Store

# Below what a job itself may hold (100 MB), with room for the rest of it.
INLINE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class StoredFile:
    """A file in a Store, and the digest that its content must have."""

    path: str
    sha256: str

    def read(self, store: Store) -> bytes:
        """The content.

        Raises:
            StoreError: it cannot be read, or was changed since.
        """
        with store.open(self.path, "rb") as file:
            content = file.read()
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise StoreError(
                f"{store.url}/{self.path} is not what was written there: its SHA-256 differs. It was changed or cut "
                "off afterwards; train again."
            )
        return content


@dataclass(frozen=True)
class Payload:
    """Bytes inside the job, or a file beside it."""

    content: bytes = b""
    file: StoredFile | None = None

    def read(self, store: Store) -> bytes:
        """The bytes."""
        return self.content if self.file is None else self.file.read(store)


def write(store: Store, path: str, content: bytes) -> StoredFile:
    """Publish a file."""
    store.publish(path, content)
    return StoredFile(path, hashlib.sha256(content).hexdigest())


def payload(store: Store, path: str, content: bytes) -> Payload:
    """Keep small content inline and write large content to ``path``."""
    return Payload(content) if len(content) <= INLINE_BYTES else Payload(file=write(store, path, content))


def write_folder(store: Store, folder: str, source: Path) -> tuple[StoredFile, ...]:
    """Publish all files of a local folder."""
    return tuple(write(store, f"{folder}/{file.name}", file.read_bytes()) for file in sorted(source.iterdir()))


@contextmanager
def fetched(store: Store, files: tuple[StoredFile, ...], within: str | None = None) -> Iterator[Path]:
    """A local folder with copies of these files, which is removed at the end.

    Args:
        store: where the files lie.
        files: the files; their names in the folder are the last parts of their paths.
        within: the folder in which the new one is made; None is the system's for temporary files.
    """
    with tempfile.TemporaryDirectory(prefix="sparkhvd-model-", dir=within) as folder:
        for file in files:
            (Path(folder) / file.path.rpartition("/")[2]).write_bytes(file.read(store))
        yield Path(folder)
