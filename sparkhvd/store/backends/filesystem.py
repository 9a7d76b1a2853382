"""A Store on any file system that fsspec supports; the Stores of S3 and HDFS derive from it."""

from __future__ import annotations

import glob
import io
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, TypeVar, cast

import fsspec
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem

from sparkhvd._util.background import in_background, is_done_within
from sparkhvd._util.suggestions import did_you_mean
from sparkhvd._util.texts import first_line
from sparkhvd.deadline import Deadline
from sparkhvd.errors import StoreError
from sparkhvd.store.access.connection import Connection
from sparkhvd.store.access.remote_file import READ_AHEAD_BYTES, SPOOL_BYTES, RangeReader, Ranges, SpooledFile
from sparkhvd.store.access.retry import is_transient, with_retries
from sparkhvd.store.folders import UNFINISHED, StoreFolders, root_of
from sparkhvd.store.options import StorageOptions, refuse_credentials
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from pyarrow import fs

Result = TypeVar("Result")

SILENCE_SECONDS = 60.0  # how long a call may take, in addition to the time for its transfer
_SLOWEST = 1e6  # bytes per second; a slower transfer counts as stalled
# A client without a time limit per call switches servers by itself before it fails: HDFS's tries three data nodes.
_SERVERS_TRIED = 3
# The package to install for the most frequent schemes; fsspec names it for the others. The versions are the first
# with an exclusive write (mode="create"): older ones replace a file that another writer has published.
_PACKAGES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("gs", "gcs"), "gcsfs>=2024.12"),
        **dict.fromkeys(("abfs", "abfss", "az"), "adlfs>=2024.12"),
        "oss": "ossfs",
        "sftp": "paramiko",
    }
)
_COMMON_SCHEMES = ("file", "s3", "hdfs", "gs", "abfss", "dbfs")
# Schemes for which Hadoop has file systems; the Spark session knows whether it has the jars.
_HADOOP_SCHEMES = frozenset({"hdfs", "viewfs", "gs", "abfs", "abfss", "wasb", "wasbs", "oss", "cos", "obs"})


@dataclass(frozen=True)
class FilesystemStore(Store):
    """A Store at any URL that fsspec opens: ``gs://``, ``abfss://``, ``memory://`` and more.

    A file appears all at once, because it is sent as a whole on ``close``. ``publish`` uses the exclusive write of the
    file system, which excludes writers on other machines if the file system supports that (GCS, ADLS). If fsspec has no
    exclusive write for a file system (SFTP, FTP, SMB, WebHDFS), its files can be read but not written.

    Attributes:
        prefix_path: the URL of the folder. None makes the Store the deepest folder that contains all the paths below.
        train_path: existing Parquet files to train on, for ``fit_on_parquet``.
        val_path: existing Parquet files to validate on.
        test_path: existing Parquet files to test on.
        runs_path: the folder of the runs, if it is not ``runs`` below the Store's folder.
        save_runs: whether checkpoints are kept.
        storage_options: the options with which fsspec opens the file system. The values are never shown or stored.
        retry_seconds: how long an operation is retried if the connection or the server fails.

    Raises:
        StoreError: the URL names no folder, contains credentials, or has a scheme that no file system serves.
    """

    prefix_path: str | None = None
    train_path: str | None = None
    val_path: str | None = None
    test_path: str | None = None
    runs_path: str | None = None
    save_runs: bool = True
    storage_options: Mapping[str, Any] | None = None
    retry_seconds: float = 60.0
    _base: str = field(init=False, repr=False, compare=False)  # the part of a URL before the location
    _folders: StoreFolders = field(init=False, repr=False, compare=False)
    _connection: Connection = field(init=False, repr=False, compare=False, default_factory=Connection)
    _opens_with_info: ClassVar[bool] = True  # whether _ranges() returns the facts about the file

    def __post_init__(self) -> None:
        names = ("prefix_path", "train_path", "val_path", "test_path", "runs_path")
        unresolved = [getattr(self, name) for name in names]
        for url in unresolved:
            refuse_credentials(url or "")
        urls = [None if url is None else self._normalized(url) for url in unresolved]
        for name, url in zip(names, urls, strict=True):
            object.__setattr__(self, name, url)
        bases = sorted({self._base_of(url) for url in urls if url is not None})
        if len(bases) > 1:
            raise StoreError(f"All paths of a Store must be on one file system, got {' and '.join(bases)}.")
        object.__setattr__(self, "_base", bases[0] if bases else "")
        object.__setattr__(self, "storage_options", StorageOptions(self.storage_options))
        prefix, *others, runs = (None if url is None else self._location_of_url(url) for url in urls)
        object.__setattr__(self, "_folders", StoreFolders(root_of(prefix, [*others, runs]), runs))

    @property
    def url(self) -> str:
        return self._url_of_location(self._folders.root)

    @property
    def scheme(self) -> str:
        """Return the scheme of the URL, such as ``s3``."""
        return self._base.partition("://")[0]

    def exists(self, path: str) -> bool:
        return self._look_up(self._folders.of(path, self.url)) is not None

    def open(self, path: str, mode: Literal["rb", "wb"]) -> BinaryIO:
        """Open a file to read, or a new one that replaces ``path`` on ``close``; an error in ``with`` discards it."""
        location = self._folders.of(path, self.url)
        if mode == "rb":
            return io.BufferedReader(self._open_reader(location), READ_AHEAD_BYTES)
        if mode == "wb":
            return cast("BinaryIO", SpooledFile(self._url_of_location(location), partial(self._replace, location)))
        raise StoreError(
            f"Cannot open {self._url_of_location(location)} with mode {mode!r}; a Store supports 'rb' and 'wb'."
        )

    def list(self, path: str) -> list[str]:
        """List all files below ``path`` (``""`` for the whole Store), sorted, without files still being written."""
        names = set()
        for top, store_path in self._folders.tops(path, self.url):
            for location in self._do("list", top, partial(self._find, top)):
                inside = location.removeprefix(top).lstrip("/")
                names.add("/".join(part for part in (store_path, inside) if part))
        return sorted(name for name in names if not name.endswith((UNFINISHED, "/")))

    def publish(self, path: str, content: bytes) -> None:
        location = self._folders.of(path, self.url)

        name = uuid.uuid4().hex  # identifies this write, because an attempt may succeed although its response is lost

        def write(attempt: int) -> None:
            filesystem = self._filesystem()
            try:
                with self._connection.lock:  # makes the generic, two-step exclusive write safe among threads
                    self._create(filesystem, location, content, name)
            except FileExistsError:
                if not self._created(filesystem, location, content, name, attempt):
                    raise

        try:
            self._do("publish", location, write, len(content))
        except StoreError as error:
            if isinstance(error.__context__, FileExistsError):  # even if a secret kept it out of __cause__
                raise StoreError(
                    f"Cannot publish {self._url_of_location(location)}: it exists already, and published files "
                    "are never changed. Use another id, or delete it first."
                ) from error.__cause__
            raise

    def delete(self, path: str) -> None:
        location = self._folders.of(path, self.url)

        def remove(_: int) -> None:
            filesystem = self._filesystem()
            filesystem.invalidate_cache()
            try:
                self._remove(filesystem, location)
            except FileNotFoundError:
                return

        self._do("delete", location, remove)

    def spark_url(self, path: str) -> str | None:
        location = self._folders.of(path, self.url)
        return self._url_of_location(location) if self.scheme in _HADOOP_SCHEMES else None

    def spark_options(self) -> dict[str, str]:
        return {}

    def arrow(self, path: str) -> tuple[fs.FileSystem, str]:
        from sparkhvd.store.access.arrow_files import arrow_filesystem  # noqa: PLC0415  (a Store is cheap to import)

        location = self._folders.of(path, self.url)
        files = arrow_filesystem(
            self._filesystem(), self._open_reader, self._look_up, opens_with_info=self._opens_with_info
        )
        return files, location

    def at(self, url: str) -> FilesystemStore:
        return replace(self, prefix_path=url, train_path=None, val_path=None, test_path=None, runs_path=None)

    def with_spark_settings(self, settings: Mapping[str, str]) -> FilesystemStore:  # noqa: ARG002
        return self

    # The methods below differ between file systems.

    def _normalized(self, url: str) -> str:
        """Return a URL in the spelling of this class."""
        if "::" in url:
            raise StoreError(f"{url!r} chains file systems, but a Store uses only one. Pass only the last URL.")
        if "://" not in url:
            raise StoreError(
                f"{url!r} is not a URL; this Store needs one such as s3://bucket/folder. For a path use LocalStore, or "
                "Store.create, which accepts both."
            )
        scheme, _, rest = url.partition("://")
        return f"{scheme.lower()}://{rest.rstrip('/')}"

    def _location_of_url(self, url: str) -> str:
        return str(self._class()._strip_protocol(url)).rstrip("/")  # noqa: SLF001  (fsspec has no public name for it)

    def _base_of(self, url: str) -> str:
        return url[: url.index("://") + 3]

    def _url_of_location(self, location: str) -> str:
        return f"{self._base}{location}"

    def _class(self) -> Any:
        try:
            return fsspec.get_filesystem_class(self.scheme)
        except (ImportError, ValueError) as error:
            package = _PACKAGES.get(self.scheme)
            if package is None and isinstance(error, ValueError):
                meant = did_you_mean(self.scheme, _COMMON_SCHEMES, show="{}://".format, cutoff=0.5)
                meant = meant or f"Common schemes are {', '.join(_COMMON_SCHEMES)}."
                raise StoreError(f"No file system serves {self.scheme}:// URLs: {error}. {meant}") from error
            install = "" if package is None else f" Install it: pip install '{package}'."
            raise StoreError(
                f"The Store for {self.scheme}:// needs a package that is not installed ({error}).{install}"
            ) from error

    def _new_filesystem(self) -> Any:
        options = dict(self.storage_options or {})
        return self._class()(**options, skip_instance_cache=True)

    def _is_transient(self, error: Exception) -> bool:
        """Return whether a retry may succeed after this error."""
        return is_transient(error)

    def _explain(self, error: Exception) -> str:
        """Return an error's message on one line."""
        if isinstance(error, FileNotFoundError):
            return "No such file or directory"
        if isinstance(error, PermissionError) and not str(error):
            return "Permission denied"
        if isinstance(error, TimeoutError) and not str(error):
            return "the server did not answer in time; check that it runs and that this machine can reach it"
        text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        return first_line(text).rstrip(".")

    def _ranges(self, location: str) -> Ranges:
        filesystem = self._filesystem()
        filesystem.invalidate_cache()
        return _FilesystemRanges(self, filesystem, location, filesystem.info(location, **self._limit(filesystem)))

    def _create(self, filesystem: Any, location: str, content: bytes, name: str) -> None:  # noqa: ARG002
        """Write a new file as a whole; ``FileExistsError`` if one exists. ``name`` identifies this write."""
        self._refuse_to_write_in_pieces(filesystem)
        filesystem.pipe_file(location, content, mode="create", **self._limit(filesystem, len(content)))

    def _created(self, filesystem: Any, location: str, content: bytes, name: str, attempt: int) -> bool:  # noqa: ARG002
        """Return whether the existing file comes from an earlier attempt of the write ``name``, or has its content."""
        may_be_own = attempt > 0 or filesystem.async_impl  # the clients of GCS and ADLS repeat requests by themselves
        return bool(may_be_own and filesystem.cat_file(location, **self._limit(filesystem, len(content))) == content)

    def _send(self, filesystem: Any, location: str, content: IO[bytes], size: int) -> None:
        """Write a file as a whole; it replaces an existing one."""
        self._refuse_to_write_in_pieces(filesystem)
        limit = self._limit(filesystem, size)
        if size <= SPOOL_BYTES:
            filesystem.pipe_file(location, content.read(size), **limit)
        else:  # the file has no name, but the path of its descriptor opens it
            filesystem.put_file(f"/proc/self/fd/{content.fileno()}", location, **limit)

    def _find(self, top: str, _: int) -> Iterable[str]:
        """Return all files below a location."""
        filesystem = self._filesystem()
        filesystem.invalidate_cache()
        try:
            return [str(location) for location in filesystem.find(top, **self._limit(filesystem))]
        except FileNotFoundError:
            return []

    def _remove(self, filesystem: Any, location: str) -> None:
        # fsspec would treat a star or bracket in the name as a pattern.
        filesystem.rm(glob.escape(location), recursive=True, **self._limit(filesystem))

    # The methods below are common to all file systems.

    def _refuse_to_write_in_pieces(self, filesystem: Any) -> None:
        """Refuse to write with fsspec's generic methods, which expose half-written files and replace existing ones."""
        kind = type(filesystem)
        if filesystem.async_impl:
            is_generic = kind._pipe_file is AsyncFileSystem._pipe_file  # noqa: SLF001  (the method that backends override)
        else:
            is_generic = kind.pipe_file is AbstractFileSystem.pipe_file
        if is_generic:
            raise StoreError(
                f"There cannot be a Store at {self.url}: {kind.__name__} has no exclusive write, so two jobs could "
                "write the same file, and a killed job would leave half of one. Mount the folder and pass its path, or "
                "use s3://, hdfs://, gs:// or abfss://. fit_on_parquet(path=...) reads Parquet files there."
            )

    def _limit(self, filesystem: Any, size: int = 0) -> dict[str, float]:
        """Return the argument for a time limit, for file systems that otherwise wait forever for a silent server."""
        return {"timeout": _seconds(size)} if filesystem.async_impl else {}

    def _bounded(self, action: Callable[[int], Result], size: int, attempt: int) -> Result:
        """Run an action that may move ``size`` bytes in a thread, and abandon the thread if the action never ends.

        A file system with its own time limits (``_limit``) needs no thread.
        """
        if self._filesystem().async_impl:
            return action(attempt)
        future = in_background(partial(action, attempt), "sparkhvd-store")
        if not is_done_within(future, _SERVERS_TRIED * _seconds(size)):
            self._connection.abandon()
            raise TimeoutError
        return future.result()

    def _filesystem(self) -> Any:
        return self._connection.get(self._new_filesystem)

    def _look_up(self, location: str) -> Mapping[str, Any] | None:
        """Return fsspec's facts about a file or folder; None if there is none."""

        def look(_: int) -> Mapping[str, Any] | None:
            filesystem = self._filesystem()
            filesystem.invalidate_cache()
            try:
                return dict(filesystem.info(location, **self._limit(filesystem)))
            except FileNotFoundError:
                return None

        return self._do("look up", location, look)

    def _open_reader(self, location: str) -> RangeReader:
        ranges = self._do("open", location, lambda _: self._ranges(location))
        return RangeReader(_ReopeningRanges(self, location, ranges))

    def _replace(self, location: str, content: IO[bytes], size: int) -> None:
        def send(_: int) -> None:
            content.seek(0)
            self._send(self._filesystem(), location, content, size)

        self._do("write", location, send, size)

    def _do(self, verb: str, location: str, action: Callable[[int], Result], size: int = 0) -> Result:
        """Return the result of an action, retried after transient errors; any other error becomes a ``StoreError``."""
        url = self._url_of_location(location)
        try:
            return with_retries(
                partial(self._bounded, action, size),
                should_retry=self._is_transient,
                deadline=Deadline.after(self.retry_seconds),
                what=f"{verb} {url}",
            )
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001  (raised below as a StoreError)
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            options = cast("StorageOptions", self.storage_options)
            # Tracebacks show causes, so a cause that contains a secret is dropped.
            whole = "".join(traceback.format_exception(error))
            cause = error if options.scrubbed(whole) == whole else None
            raise StoreError(f"Cannot {verb} {url}: {options.scrubbed(self._explain(error))}{notes}.") from cause


@dataclass(frozen=True)
class _FilesystemRanges:
    store: FilesystemStore
    filesystem: Any
    location: str
    info: Mapping[str, Any]

    @property
    def size(self) -> int:
        return int(self.info["size"])

    def read(self, start: int, stop: int) -> bytes:
        limit = self.store._limit(self.filesystem, stop - start)  # noqa: SLF001
        return bytes(self.filesystem.cat_file(self.location, start=start, end=stop, **limit))


class _ReopeningRanges:
    """Ranges of a file that is reopened when a read fails."""

    def __init__(self, store: FilesystemStore, location: str, ranges: Ranges) -> None:
        self._store = store
        self._location = location
        self._ranges = ranges
        self.size, self.info = ranges.size, ranges.info

    def read(self, start: int, stop: int) -> bytes:
        read = partial(self._read, start, stop)
        return self._store._do("read", self._location, read, stop - start)  # noqa: SLF001

    def _read(self, start: int, stop: int, attempt: int) -> bytes:
        if attempt > 0:
            self._ranges = self._store._ranges(self._location)  # noqa: SLF001
            if self._ranges.size != self.size:
                raise StoreError(f"{self._location} changed while it was being read; files of a Store must not change.")
        content = self._ranges.read(start, stop)
        if len(content) != stop - start:
            raise ConnectionError(f"received {len(content)} of {stop - start} bytes")
        return content


def _seconds(size: int) -> float:
    """Return how long a call that moves this many bytes may take."""
    return SILENCE_SECONDS + size / _SLOWEST
