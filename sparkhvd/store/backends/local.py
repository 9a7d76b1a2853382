"""A Store in a local or mounted folder."""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

from sparkhvd._util.background import in_background
from sparkhvd.errors import StoreError
from sparkhvd.store.access.disk import BUFFER_BYTES, DiskFile, ask_disk, is_silent, open_to_read
from sparkhvd.store.access.renaming import rename, rename_once
from sparkhvd.store.folders import LEFTOVER_SECONDS, UNFINISHED, StoreFolders, root_of
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from pyarrow import fs

T = TypeVar("T")
logger = logging.getLogger(__name__)

_TRIES = 100
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS})
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
_RACE_ERRNOS = frozenset({errno.ENOENT, errno.ENOTEMPTY, errno.EISDIR, None})


@dataclass(frozen=True)
class LocalStore(Store):
    """A folder on this machine, or on a file system that the driver and all executors mount at the same path.

    A file appears all at once: it is written under a hidden name in the same folder, synced, and then renamed
    (``open``) or linked (``publish``; a link never overwrites, even in a race). Mounts without links (SMB, gcsfuse,
    blobfuse) use a folder that only one writer can create instead.

    Attributes:
        prefix_path: the folder, as a path or a ``file://`` URL. A relative path is resolved when the Store is created.
            A URL is read literally, without percent-decoding, as in Spark. A missing folder is created with its first
            file. None makes the Store the deepest folder that contains all the paths below.
        train_path: existing Parquet files to train on, for ``fit_on_parquet``.
        val_path: existing Parquet files to validate on.
        test_path: existing Parquet files to test on.
        runs_path: the folder of the runs, if it is not ``runs`` below the Store's folder.
        save_runs: whether checkpoints are kept.
        storage_options: must be empty, because a folder needs no options.

    Raises:
        StoreError: there are storage options, the path is a file, or the folder can be neither used nor created.
    """

    prefix_path: str | None = None
    train_path: str | None = None
    val_path: str | None = None
    test_path: str | None = None
    runs_path: str | None = None
    save_runs: bool = True
    storage_options: Mapping[str, Any] | None = None
    _folders: StoreFolders = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.storage_options:
            raise StoreError(
                f"A {type(self).__name__} does not accept storage_options, got {', '.join(self.storage_options)}. "
                "Leave them out: a folder needs none."
            )
        object.__setattr__(self, "storage_options", None)
        names = ("prefix_path", "train_path", "val_path", "test_path", "runs_path")
        paths = [None if (value := getattr(self, name)) is None else self._absolute(value) for name in names]
        for name, path in zip(names, paths, strict=True):
            object.__setattr__(self, name, path)
        root = root_of(paths[0], paths[1:])
        object.__setattr__(self, "_folders", StoreFolders(root, self.runs_path))
        for folder in {root, self.runs_path or root}:
            ask_disk("use the folder", f"file://{folder}", partial(_require_usable, folder))

    @property
    def root(self) -> str:
        """Return the absolute path of the folder."""
        return self._folders.root

    @property
    def url(self) -> str:
        return f"file://{self.root}"

    def exists(self, path: str) -> bool:
        return ask_disk("look up", self._url_of(path), partial(os.path.lexists, self._file(path)))

    def open(self, path: str, mode: Literal["rb", "wb"]) -> BinaryIO:
        """Open a file to read, or a new one that replaces ``path`` on ``close``; an error in ``with`` discards it."""
        target, url = self._file(path), self._url_of(path)
        if mode == "rb":
            return open_to_read(target, url)
        if mode == "wb":
            create = partial(_retry_if_folder_vanishes, lambda: _UnfinishedFile(_with_folder(target), url))
            return ask_disk("open", url, create)
        raise StoreError(f"Cannot open {url} with mode {mode!r}; a Store supports 'rb' and 'wb'.")

    def list(self, path: str) -> list[str]:
        """List all files below ``path`` (``""`` for the whole Store), sorted, without files still being written.

        Files that killed writers have left are removed.
        """
        names: set[str] = set()
        for top, store_path in self._folders.tops(path, self.url):
            found = ask_disk("list", f"file://{top}", partial(_files_at, Path(top)))
            if path and found == [Path(top)]:
                return [path]
            names.update(Path(store_path, file.relative_to(top)).as_posix() for file in found)
        return sorted(names)

    def publish(self, path: str, content: bytes) -> None:
        target = self._file(path)

        def publish() -> None:
            try:
                _retry_if_folder_vanishes(lambda: self._publish(_with_folder(target), content))
            except FileExistsError as error:
                raise StoreError(
                    f"Cannot publish {self._url_of(path)}: it exists already, and published files are never changed. "
                    "Use another id, or delete it first."
                ) from error
            with suppress(FileNotFoundError):  # another process has already removed it
                _sync_folder(target.parent)
            _remove_leftovers(target.parent)

        ask_disk("publish", self._url_of(path), publish, len(content))

    def delete(self, path: str) -> None:
        target = self._file(path)

        def delete() -> None:
            with suppress(FileNotFoundError):
                _remove(target)
                self._remove_empty_folders(target)

        ask_disk("delete", self._url_of(path), delete)

    def spark_url(self, path: str) -> str:
        return self._url_of(path)

    def spark_options(self) -> dict[str, str]:
        return {}

    def with_spark_settings(self, settings: Mapping[str, str]) -> LocalStore:  # noqa: ARG002  (no access to grant)
        return self

    def at(self, url: str) -> LocalStore:
        return type(self)(url)

    def arrow(self, path: str) -> tuple[fs.FileSystem, str]:
        from pyarrow import fs  # noqa: PLC0415  (a Store is cheap to import)

        return fs.LocalFileSystem(use_mmap=True), str(self._file(path))

    def _remove_empty_folders(self, target: Path) -> None:
        """Remove the folders above a removed file that are empty now; object stores have no folders either."""
        tops = {Path(self.root), Path(self.runs_path or self.root)}
        with suppress(OSError):  # another process has written a file, or has removed the folder
            for folder in target.parents:
                if folder in tops or tops.isdisjoint(folder.parents):
                    return
                folder.rmdir()

    def _absolute(self, path_or_url: str) -> str:
        return absolute_path(path_or_url)

    def _file(self, path: str) -> Path:
        return Path(self._folders.of(path, self.url))

    def _url_of(self, path: str) -> str:
        return f"file://{self._file(path)}"

    def _publish(self, target: Path, content: bytes) -> None:
        temporary = _unfinished_name(target)
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            self._give_name(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def _give_name(self, temporary: Path, target: Path) -> None:
        """Link a file to its final name; ``FileExistsError`` if the name exists, which a rename would replace."""
        try:
            os.link(temporary, target)
        except FileExistsError:
            if not temporary.samefile(target):  # NFS repeats a request whose answer was lost
                raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            rename_once(temporary, target)


class _UnfinishedFile(io.BufferedWriter):
    """A file under a hidden name that gets its real name on ``close``."""

    def __init__(self, target: Path, url: str) -> None:
        self._target = target
        self._url = url
        temporary = _unfinished_name(target)
        super().__init__(DiskFile(temporary, "xb", url), BUFFER_BYTES)
        self._temporary = temporary  # set last: it marks a file that must be closed

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
            ask_disk("write", self._url, partial(os.fsync, self.fileno()), self.tell())
            super().close()
            ask_disk("write", self._url, self._publish)
        except BaseException as error:
            self._discard_after(error)
            raise

    def _publish(self) -> None:
        rename(self._temporary, self._target)
        with suppress(FileNotFoundError):  # another process has already removed it
            _sync_folder(self._target.parent)

    def _discard_after(self, error: BaseException | None) -> None:
        if is_silent(error):  # wait no longer
            in_background(self._discard, "sparkhvd-store")
        else:
            self._discard()

    def _discard(self) -> None:
        with suppress(OSError, StoreError):  # content that could not be flushed is dropped on purpose
            super().close()
        with suppress(OSError):
            self._temporary.unlink()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._discard_after(error)

    def __del__(self) -> None:
        # io's own finalizer would call close(), which would publish the half-written content of an abandoned file.
        if hasattr(self, "_temporary"):
            self._discard()


def absolute_path(path_or_url: str) -> str:
    """Return the absolute path of a path or a ``file:`` URL."""
    path = path_or_url
    if path.lower().startswith("file:"):
        path = path[len("file:") :]
        if path.startswith("//"):
            host, slash, rest = path[2:].partition("/")
            if host not in {"", "localhost"} or not slash:
                raise StoreError(
                    f"{path_or_url!r} names the host {host!r}; a file URL is file:///absolute/path, for a folder that "
                    "every machine mounts at the same path."
                )
            path = "/" + rest
    if not path.strip():
        raise StoreError(f"{path_or_url!r} names no folder; a Store needs a path such as /mnt/shared/experiments.")
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111  (Path.absolute keeps '..')


def _files_at(top: Path) -> list[Path]:
    """Return a file itself, or the files below a folder, without unfinished ones; remove those of killed writers."""
    if top.is_file():
        return [top]
    files = []
    for file in files_below(top):
        if file.name.endswith(UNFINISHED):
            _remove_leftover(file)
        else:
            files.append(file)
    return files


def files_below(top: Path) -> Iterator[Path]:
    """Yield all regular files below a folder, also through links; links back to a folder on the way are skipped.

    A warning names broken links, for example to files that DVC or git-annex has not fetched.
    """
    for folder, folders, names in os.walk(top, onerror=_raise_unless_missing, followlinks=True):
        parent = Path(folder)
        folders[:] = [name for name in folders if not _is_loop(parent / name)]
        for file in map(parent.joinpath, names):
            if file.is_file():
                yield file
            elif file.is_symlink() and not file.exists():
                logger.warning("Skipped %s, a link to something that does not exist.", file)


def _is_loop(folder: Path) -> bool:
    if not folder.is_symlink():
        return False
    target = folder.resolve()
    return any(parent.resolve().is_relative_to(target) for parent in folder.parents)


def _retry_if_folder_vanishes(write: Callable[[], T]) -> T:
    """Retry a write if another process removes the folder meanwhile."""
    for _ in range(_TRIES - 1):
        with suppress(FileNotFoundError):
            return write()
    return write()


def _remove(target: Path) -> None:
    """Remove a file or folder, even if other processes write to it or remove it at the same time."""
    for attempt in range(_TRIES):
        try:
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink()
        except OSError as error:
            # rmtree raises an error without errno when another process has replaced a folder.
            if error.errno not in _RACE_ERRNOS or attempt == _TRIES - 1:
                raise
        if not os.path.lexists(target):
            return


def _with_folder(target: Path) -> Path:
    _create_folder(target.parent)
    return target


def _create_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        # pathlib also raises this error for a folder that vanishes between its two checks.
        if not stat.S_ISDIR(folder.stat().st_mode):
            raise


def _require_usable(folder: str) -> None:
    if Path(folder).is_file():
        raise StoreError(
            f"file://{folder} is a file, but a Store needs a folder. Pass another path, or remove the file."
        )
    if not _retry_if_folder_vanishes(partial(_is_usable, Path(folder))):
        raise StoreError(
            f"The Store file://{folder} is not readable and writable for this user; choose another folder."
        )


def _is_usable(folder: Path) -> bool:
    """Return whether this user can read and write a folder; a missing one is created for this check.

    Raises:
        FileNotFoundError: another process that checks the same folder has removed it.
    """
    with _temporarily_created(folder):
        usable = os.access(folder, os.R_OK | os.W_OK | os.X_OK)
        if not usable:
            folder.stat()
        return usable


def _unfinished_name(target: Path) -> Path:
    return target.with_name(f".{uuid.uuid4().hex}{UNFINISHED}")


def _remove_leftovers(folder: Path) -> None:
    """Remove the files in a folder that killed writers have left."""
    with suppress(OSError), os.scandir(folder) as entries:  # other writers may remove the folder
        for entry in entries:
            if entry.name.endswith(UNFINISHED):
                _remove_leftover(Path(entry.path))


def _remove_leftover(unfinished: Path) -> None:
    """Remove an unfinished file if its writer was killed long ago."""
    with suppress(OSError):  # other writers may remove it, too, or this one may only read
        if unfinished.lstat().st_mtime < time.time() - LEFTOVER_SECONDS:
            unfinished.unlink()


def _sync_folder(folder: Path) -> None:
    """Make a new name durable if the folder can be synced: POSIX stores names in the folder, not in the file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _temporarily_created(folder: Path) -> Iterator[None]:
    """Create a folder; on exit, remove the created folders unless others use them."""
    missing = [location for location in (folder, *folder.parents) if not location.exists()]
    _create_folder(folder)
    try:
        yield
    finally:
        with suppress(OSError):
            for location in missing:
                location.rmdir()


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
