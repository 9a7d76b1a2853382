"""Bytes that a job needs, on their way: small ones with the job, large ones as a file in the Store.

What is unpickled comes either with the job, whose way is authenticated, or from a file whose SHA-256 came with the job:
somebody who can write to the Store cannot make a rank or an executor run code.
"""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol

from sparkhvd.data.spark.job import is_connect
from sparkhvd.errors import ParamError, StoreError
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Below what a job itself may hold (100 MB), with room for the rest of it.
INLINE_BYTES = 64 * 1024 * 1024
PIECE_BYTES = 8 * 1024 * 1024


class FileSource(Protocol):
    """Where files can be read: a Store, or one of the two below."""

    @property
    def url(self) -> str: ...
    def open(self, path: str, mode: Literal["rb"]) -> BinaryIO: ...


@dataclass(frozen=True)
class SessionFiles:
    """Files that were sent to the executors with a Spark session."""

    url: str = "files sent with the Spark session"

    def open(self, path: str, mode: Literal["rb"]) -> BinaryIO:
        from pyspark import SparkFiles  # noqa: PLC0415  (ranks read this module without Spark)

        return Path(SparkFiles.get(_session_name(path))).open(mode)


@dataclass(frozen=True)
class InMemoryFiles:
    """Files in the memory of this process: a model that was trained without a Store.

    Attributes:
        content: their content, by path.
    """

    content: tuple[tuple[str, bytes], ...] = field(repr=False)
    url: str = "memory"

    def open(self, path: str, mode: Literal["rb"]) -> BinaryIO:
        if mode != "rb":
            raise StoreError(f"{path} is kept in memory and is only read.")
        return BytesIO(dict(self.content)[path])

    def sent_with(self, spark: SparkSession) -> SessionFiles:
        """The same files where the executors of a session can read them; the session keeps them until it ends."""
        if is_connect(spark):
            self._upload(spark)
        else:
            self._offer(spark)
        return SessionFiles()

    def _upload(self, spark: SparkSession) -> None:
        with tempfile.TemporaryDirectory(prefix="sparkhvd-send-") as folder:
            for path, content in self.content:
                file = Path(folder) / _session_name(path)
                file.write_bytes(content)
                try:
                    spark.addArtifacts(str(file), file=True)
                except Exception as error:
                    if "ALREADY_EXISTS" not in str(error):  # else it is the same: the name is made of the content
                        raise

    def _offer(self, spark: SparkSession) -> None:
        from pyspark import SparkFiles  # noqa: PLC0415

        # Executors fetch the files from here whenever they start; Spark removes the folder with the application.
        folder = Path(SparkFiles.getRootDirectory()) / "sparkhvd-models"
        folder.mkdir(exist_ok=True)
        for path, content in self.content:
            file = folder / _session_name(path)
            if not file.exists():
                unfinished = file.with_name(f".{uuid.uuid4().hex}")
                unfinished.write_bytes(content)
                unfinished.replace(file)
                spark.sparkContext.addFile(str(file))


def _session_name(path: str) -> str:
    return path.replace("/", "-")


@dataclass(frozen=True)
class StoredFile:
    """A file in a Store, and the digest that its content must have."""

    path: str
    sha256: str

    def read(self, store: FileSource) -> bytes:
        """The content.

        Raises:
            StoreError: it cannot be read, or was changed since.
        """
        content = BytesIO()
        self.copy_to(content, store)
        return content.getvalue()

    def copy_to(self, target: BinaryIO, store: FileSource) -> None:
        """Write the content, piece by piece, so that a model may be larger than the memory.

        Raises:
            StoreError: it cannot be read, or was changed since; part of it has been written then.
        """
        with store.open(self.path, "rb") as file:
            digest = _copied(file, target)
        if digest != self.sha256:
            raise StoreError(
                f"{store.url}/{self.path} is not what was written there: its SHA-256 differs. It was changed or cut "
                "off afterwards; train again."
            )


def _copied(source: BinaryIO, target: BinaryIO) -> str:
    """Copy all of a file; the SHA-256 of its content."""
    digest = hashlib.sha256()
    while piece := source.read(PIECE_BYTES):
        digest.update(piece)
        target.write(piece)
    return digest.hexdigest()


@dataclass(frozen=True)
class Payload:
    """Bytes inside the job, or a file beside it."""

    content: bytes = b""
    file: StoredFile | None = None

    def read(self, store: Store | None) -> bytes:
        """The bytes."""
        return self.content if self.file is None or store is None else self.file.read(store)


def write(store: Store, path: str, content: bytes) -> StoredFile:
    """Publish a file."""
    store.publish(path, content)
    return StoredFile(path, hashlib.sha256(content).hexdigest())


def to_payload(store: Store | None, path: str, content: bytes) -> Payload:
    """Keep small content inline and write large content to ``path``.

    Raises:
        ParamError: it is large, and there is no Store.
    """
    if store is None and len(content) > INLINE_BYTES:
        raise ParamError(
            f"The model with its optimizer and loss is {len(content):,} bytes; more than {INLINE_BYTES:,} need a Store "
            "on their way to the ranks and back. Pass store=."
        )
    if store is None:
        return Payload(content)
    return Payload(content) if len(content) <= INLINE_BYTES else Payload(file=write(store, path, content))


def read_folder(source: Path) -> tuple[tuple[StoredFile, ...], InMemoryFiles]:
    """All files of a local folder, for a process without a Store; the same content has the same paths."""
    contents = {file.name: file.read_bytes() for file in sorted(source.iterdir())}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    folder = f"sparkhvd-model-{hashlib.sha256(repr(digests).encode()).hexdigest()[:32]}"
    found = tuple(StoredFile(f"{folder}/{name}", digest) for name, digest in digests.items())
    return found, InMemoryFiles(tuple((f"{folder}/{name}", content) for name, content in contents.items()))


def write_folder(store: Store, folder: str, source: Path) -> tuple[StoredFile, ...]:
    """Write all files of a local folder, piece by piece."""
    found = []
    for file in sorted(source.iterdir()):
        path = f"{folder}/{file.name}"
        with file.open("rb") as content, store.open(path, "wb") as target:
            found.append(StoredFile(path, _copied(content, target)))
    return tuple(found)


def replace_file(store: Store, path: str, source: Path) -> None:
    """Write a local file, piece by piece, in place of what is there."""
    store.delete(path)
    with source.open("rb") as content, store.open(path, "wb") as target:
        _copied(content, target)


@contextmanager
def local_copies(store: FileSource, files: tuple[StoredFile, ...], within: str | None = None) -> Iterator[Path]:
    """A local folder with copies of these files, which is removed at the end.

    Args:
        store: where they can be read.
        files: the files; their names in the folder are the last parts of their paths.
        within: the folder in which the new one is made; None is the system's for temporary files.
    """
    with tempfile.TemporaryDirectory(prefix="sparkhvd-model-", dir=within) as folder:
        for file in files:
            with (Path(folder) / file.path.rpartition("/")[2]).open("wb") as target:
                file.copy_to(target, store)
        yield Path(folder)
