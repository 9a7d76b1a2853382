"""Sources of rows: blocks of Parquet and Arrow files as Arrow record batches."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sparkhvd._util.counts import counted
from sparkhvd.data.read.shards import Piece
from sparkhvd.data.schema import calendars, columns
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.data.schema.manifest import DataFile, Split
from sparkhvd.errors import DataError, SparkHvdError, StoreError
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import fs

_TAIL_BYTES = 64 * 1024  # longer than most footers


class Blocks(Protocol):
    """Blocks of rows that can be read in any order and from several threads."""

    @property
    def where(self) -> str:
        """Return the name of all blocks for error messages."""

    def location(self, block: int) -> str:
        """Return the name of one block for error messages."""

    @property
    def fresh(self) -> bool:
        """Return whether the memory of every batch belongs to the caller, who may write to it."""

    def batches(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a piece.

        Raises:
            DataError: the rows differ from the manifest, or have old dates that only Spark converts.
            StoreError: they cannot be read.
        """


@dataclass(frozen=True)
class FileVersion:
    """What identifies the content of a file.

    Attributes:
        digest: of its footer; empty for prepared files.
        modified: when it was modified, as this machine sees it, in nanoseconds; None if that is not known.
    """

    digest: bytes
    modified: int | None


class ParquetBlocks:
    """The row groups of a split in a Store.

    Args:
        store: the Store that contains the files.
        folder: the dataset's folder in it.
        split: the files.
        schema: the columns to read.
        chunk_rows: rows to decode at once.
        versions: the versions of the files by URL. The first read of a file adds its version; later reads compare it,
            to detect that the file was replaced.
    """

    fresh = True

    def __init__(
        self,
        store: Store,
        folder: str,
        split: Split,
        schema: DataSchema,
        chunk_rows: int,
        *,
        versions: dict[str, FileVersion] | None = None,
    ) -> None:
        self._store = store
        self._folder = folder
        self._blocks = split.blocks()
        self._schema = schema
        self._chunk_rows = chunk_rows
        self._lock = threading.Lock()  # guards _footers and _versions
        self._footers: dict[str, pa.FileMetaData] = {}
        self._versions = {} if versions is None else versions
        self.where = f"{store.url}/{folder}"

    def _path(self, file: DataFile) -> str:
        return f"{self._folder}/{file.path}".lstrip("/")

    def location(self, block: int) -> str:
        file, index = self._blocks[block]
        return f"row group {index} of {self._store.url}/{self._path(file)}"

    def batches(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa  # noqa: PLC0415  (heavy)

        file, index = self._blocks[piece.block]
        path = self._path(file)
        url = f"{self._store.url}/{path}"
        names = columns.stored_names(self._schema)
        end = 0
        try:
            filesystem, arrow_path = self._store.arrow(path)
            content, modified = _open(filesystem, arrow_path, file)
            with content, closing(self._opened(content, file, url, modified)) as opened:
                julian = calendars.julian_leaves(opened.metadata)
                for batch in opened.iter_batches(
                    self._chunk_rows, row_groups=[index], columns=names, use_threads=False
                ):
                    if julian:
                        calendars.check_rows(batch, self._schema, julian, url)
                    begin, end = end, end + batch.num_rows
                    if end > piece.start:
                        first = max(piece.start - begin, 0)
                        yield batch.slice(first, min(piece.stop, end) - begin - first)
                    if end >= piece.stop:
                        # A program may write to the file itself while it is read.
                        self._check_unmodified(_modified(filesystem, arrow_path, file), url)
                        return
        except SparkHvdError:
            raise
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"Cannot read {url}: {str(error).rstrip('.')}.") from error
        raise DataError(
            f"{url} ends after {counted(end, 'row')} of a row group that should have more: the file is damaged. Write "
            "it again."
        )

    def _opened(self, content: pa.NativeFile, file: DataFile, url: str, modified: int | None) -> pa.parquet.ParquetFile:
        from pyarrow import parquet  # noqa: PLC0415

        size = content.size()
        if file.size is not None and size != file.size:
            raise _replaced(url, f"has {size} bytes, but had {file.size}")
        with self._lock:
            footer = self._footers.get(url)
        opened = parquet.ParquetFile(content, metadata=footer, pre_buffer=True, coerce_int96_timestamp_unit="us")
        if footer is None:
            _check_row_groups(opened.metadata, file, url)
            digest = b"" if file.size is None else footer_digest(content, size)
            with self._lock:
                earlier = self._versions.setdefault(url, FileVersion(file.digest or digest, modified))
            if digest != earlier.digest:
                raise _replaced(url, "has another footer than")
            with self._lock:
                self._footers[url] = opened.metadata
        self._check_unmodified(modified, url)
        return opened

    def _check_unmodified(self, modified: int | None, url: str) -> None:
        with self._lock:
            earlier = self._versions[url]
        if modified != earlier.modified:
            raise _replaced(url, "has another modification time than")


class ArrowBlocks:
    """The record batches of a local Arrow file, which is mapped into memory without a copy.

    Args:
        path: the file.
        where: the name of the file for error messages.
        names: the real names of columns that are renamed in the file, by their names in the file.
    """

    fresh = False

    def __init__(self, path: str, where: str, names: Mapping[str, str] | None = None) -> None:
        import pyarrow as pa  # noqa: PLC0415

        self.where = where
        self._names = names or {}
        self._lock = threading.Lock()  # guards _reader
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(path))
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"Cannot read {where}: {str(error).rstrip('.')}.") from error

    def location(self, block: int) -> str:  # noqa: ARG002 - a user knows no record batches
        return self.where

    @property
    def count(self) -> int:
        """Return the number of record batches."""
        return int(self._reader.num_record_batches)

    def whole(self, block: int) -> pa.RecordBatch:
        """Return one record batch."""
        import pyarrow as pa  # noqa: PLC0415

        with self._lock:
            batch = self._reader.get_batch(block)
        names = [self._names.get(name, name) for name in batch.schema.names]
        return pa.RecordBatch.from_arrays(batch.columns, names)

    def batches(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        yield self.whole(piece.block).slice(piece.start, piece.rows)


def footer_digest(file: pa.NativeFile, size: int) -> bytes:
    """Return a digest of a footer, which contains the offset, size, minimum and maximum of every column chunk.

    It is that of the stored bytes, because versions of pyarrow write the same footer differently.

    Args:
        file: a Parquet file.
        size: its size in bytes.
    """
    tail = file.read_at(min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
    footer_bytes = int.from_bytes(tail[-8:-4], "little") + 8
    if footer_bytes > len(tail):
        tail = file.read_at(min(size, footer_bytes), max(0, size - footer_bytes))
    return hashlib.sha256(tail[-footer_bytes:]).digest()


def _open(filesystem: fs.FileSystem, path: str, file: DataFile) -> tuple[pa.NativeFile, int | None]:
    """Open a file, and return when it was modified; see ``_modified``."""
    from sparkhvd.store.access.arrow_files import open_with_time  # noqa: PLC0415  (imports pyarrow)

    return (filesystem.open_input_file(path), None) if file.size is None else open_with_time(filesystem, path)


def _modified(filesystem: fs.FileSystem, path: str, file: DataFile) -> int | None:
    """Return when a file was modified, in nanoseconds; None for prepared files and where it is not known."""
    if file.size is None:
        return None
    modified: int | None = filesystem.get_file_info(path).mtime_ns
    return modified


def _replaced(url: str, what: str) -> DataError:
    return DataError(
        f"{url} {what} when the training began: it was replaced meanwhile. Train again, and leave the files unchanged "
        "until the training ends."
    )


def _check_row_groups(metadata: pa.FileMetaData, file: DataFile, url: str) -> None:
    row_groups = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    if row_groups != list(file.row_groups):
        raise DataError(
            f"{url} has row groups of {row_groups} rows, but the manifest says {list(file.row_groups)}: the dataset "
            "was changed after it was prepared. Prepare it again."
        )
