"""The files and pickled bytes of a job: small ones are sent with the job, large ones are files in the Store.

Bytes are unpickled only if they came with the job, over an authenticated connection, or if their SHA-256 came with the
job. Write access to the Store is therefore not enough to make a rank or an executor run code.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol

from sparkhvd._util.error_chain import error_chain
from sparkhvd.compat.spark import is_connect
from sparkhvd.errors import ParamError, StoreError
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

# Less than the limit of a whole job (PAYLOAD_CAP_BYTES, 100 MiB), to leave room for the rest of the job.
INLINE_BYTES = 64 * 1024 * 1024
PIECE_BYTES = 8 * 1024 * 1024


class FileSource(Protocol):
    """A source of files, such as a Store, ``SessionFiles`` or ``InMemoryFiles``."""

    @property
    def url(self) -> str: ...
    def open(self, path: str, mode: Literal["rb"]) -> BinaryIO: ...


@dataclass(frozen=True)
class SessionFiles:
    """Files that were distributed to the executors with a Spark session."""

    url: str = "files sent with the Spark session"

    def open(self, path: str, mode: Literal["rb"]) -> BinaryIO:
        from pyspark import SparkFiles  # noqa: PLC0415  (ranks import this module without Spark)

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
            raise StoreError(f"{path} is held in memory and can only be opened with mode 'rb', got {mode!r}.")
        return BytesIO(dict(self.content)[path])

    def sent_with(self, spark: SparkSession) -> SessionFiles:
        """Distribute the files to the executors of a session, which keeps them until it ends."""
        if is_connect(spark):
            self._upload(spark)
        else:
            self._add_files(spark)
        return SessionFiles()

    def _upload(self, spark: SparkSession) -> None:
        with tempfile.TemporaryDirectory(prefix="sparkhvd-send-") as folder:
            for path, content in self.content:
                file = Path(folder) / _session_name(path)
                file.write_bytes(content)
                try:
                    spark.addArtifacts(str(file), file=True)
                except Exception as error:
                    # An existing file is the same, because its name contains a digest of the content.
                    if "ALREADY_EXISTS" not in str(error):
                        raise

    def _add_files(self, spark: SparkSession) -> None:
        from pyspark import SparkFiles  # noqa: PLC0415

        # Executors fetch the files from this folder whenever they start; Spark removes it with the application.
        folder = Path(SparkFiles.getRootDirectory()) / "sparkhvd-models"
        folder.mkdir(exist_ok=True)
        for path, content in self.content:
            file = folder / _session_name(path)
            added = file.with_name(f".{file.name}.added")
            if not added.exists():
                unfinished = file.with_name(f".{uuid.uuid4().hex}")
                unfinished.write_bytes(content)
                unfinished.replace(file)
                spark.sparkContext.addFile(str(file))  # Spark ignores a file that it already has
                added.touch()


def _session_name(path: str) -> str:
    return path.replace("/", "-")


@dataclass(frozen=True)
class StoredFile:
    """A file in a Store, and the digest of its content."""

    path: str
    sha256: str

    def read(self, store: FileSource) -> bytes:
        """Return the content.

        Raises:
            StoreError: the file cannot be read, or has changed since it was written.
        """
        content = BytesIO()
        self.copy_to(content, store)
        return content.getvalue()

    def copy_to(self, target: BinaryIO, store: FileSource) -> None:
        """Copy the content in chunks, so that a model may be larger than the memory.

        Raises:
            StoreError: the file cannot be read, or has changed since it was written; the copy is then unusable.
        """
        with store.open(self.path, "rb") as file:
            digest = _copy_and_hash(file, target)
        if digest != self.sha256:
            raise StoreError(
                f"{store.url}/{self.path} was changed or truncated after it was written: its SHA-256 differs. Train "
                "again."
            )


def _copy_and_hash(source: BinaryIO, target: BinaryIO) -> str:
    """Copy a file and return the SHA-256 of its content."""
    digest = hashlib.sha256()
    while piece := source.read(PIECE_BYTES):
        digest.update(piece)
        target.write(piece)
    return digest.hexdigest()


@dataclass(frozen=True)
class Payload:
    """Bytes inside the job, or a file in the Store."""

    content: bytes = b""
    file: StoredFile | None = None

    def read(self, store: Store | None) -> bytes:
        """Return the bytes."""
        return self.content if self.file is None or store is None else self.file.read(store)


def write(store: Store, path: str, content: bytes) -> StoredFile:
    """Publish a file and return its path and digest."""
    store.publish(path, content)
    return StoredFile(path, hashlib.sha256(content).hexdigest())


def to_payload(store: Store | None, path: str, content: bytes) -> Payload:
    """Keep small content inline and write large content to ``path``.

    Raises:
        ParamError: the content is large and there is no Store.
    """
    if store is None and len(content) > INLINE_BYTES:
        raise ParamError(
            f"The model with its optimizer and loss has {len(content):,} bytes, but without a Store, at most "
            f"{INLINE_BYTES:,} bytes can be sent to the ranks. Pass store=."
        )
    if store is None:
        return Payload(content)
    return Payload(content) if len(content) <= INLINE_BYTES else Payload(file=write(store, path, content))


def delete_payload(store: Store, payload: Payload) -> None:
    """Delete the file of a payload, if it has one; a failure is logged, because it must not fail the job."""
    if payload.file is not None:
        try:
            store.delete(payload.file.path)
        except StoreError as error:
            logger.warning(
                "This fit could not delete %s/%s, which only its ranks needed: %s", store.url, payload.file.path, error
            )


def read_folder(source: Path) -> tuple[tuple[StoredFile, ...], InMemoryFiles]:
    """Read all files of a local folder into memory; equal content gets equal paths."""
    contents = {file.name: file.read_bytes() for file in sorted(source.iterdir())}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    folder = f"sparkhvd-model-{hashlib.sha256(repr(digests).encode()).hexdigest()[:32]}"
    files = tuple(StoredFile(f"{folder}/{name}", digest) for name, digest in digests.items())
    return files, InMemoryFiles(tuple((f"{folder}/{name}", content) for name, content in contents.items()))


def write_folder(store: Store, folder: str, source: Path) -> tuple[StoredFile, ...]:
    """Copy all files of a local folder to a Store in chunks."""
    written = []
    for file in sorted(source.iterdir()):
        path = f"{folder}/{file.name}"
        with file.open("rb") as content, store.open(path, "wb") as target:
            written.append(StoredFile(path, _copy_and_hash(content, target)))
    return tuple(written)


def replace_file(store: Store, path: str, source: Path) -> None:
    """Replace a file in a Store with a local file, copied in chunks; after a failure, the earlier file remains."""
    with source.open("rb") as content, store.open(path, "wb") as target:
        _copy_and_hash(content, target)


@contextmanager
def naming_full_disk(folder: str) -> Iterator[None]:
    """Turn errors of a full disk within this block into one that names the folder.

    Raises:
        StoreError: the disk of ``folder`` is full.
    """
    try:
        yield
    except Exception as error:
        if (full := _full_disk(error)) is None:
            raise
        raise StoreError(
            f"Cannot write the model to the local folder {folder}: {full.strerror}. Free space on its disk, or set "
            "TMPDIR to a folder on a larger one."
        ) from error


def _full_disk(raised: BaseException) -> OSError | None:
    """Return the error of a full disk that caused another one, perhaps within a library."""
    for error in error_chain(raised):
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            return error
    return None


@contextmanager
def local_copies(store: FileSource, files: tuple[StoredFile, ...], within: str | None = None) -> Iterator[Path]:
    """Yield a local folder with copies of the files, and remove it at the end.

    Args:
        store: the Store or other source of the files.
        files: the files; their names in the folder are the last parts of their paths.
        within: the parent of the new folder; None means the system's folder for temporary files.

    Raises:
        StoreError: a file cannot be read, has changed, or the local disk is full.
    """
    with tempfile.TemporaryDirectory(prefix="sparkhvd-model-", dir=within) as folder:
        with naming_full_disk(folder):
            for file in files:
                with (Path(folder) / file.path.rpartition("/")[2]).open("wb") as target:
                    file.copy_to(target, store)
        yield Path(folder)
