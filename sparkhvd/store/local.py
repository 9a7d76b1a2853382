"""A Store in a local or mounted folder."""

from __future__ import annotations

import io
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Literal

from sparkhvd.errors import StoreError
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from pyarrow import fs

_UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class LocalStore(Store):
    """A folder on this machine, or on a file system that the driver and all executors mount at the same path.

    Files appear all at once: they are written under a hidden name in the same folder, synced, and then renamed
    (``open``) or linked (``publish``, which therefore refuses to overwrite also in a race).

    Attributes:
        root: the absolute path; given as a path (relative ones are resolved now, on the driver) or a ``file://`` URL,
            which is taken literally, without percent-decoding, as Spark does. The folder is made if it is missing.

    Raises:
        StoreError: the path is a file, or the folder can neither be used nor made.
    """

    root: str

    def __post_init__(self) -> None:
        root = _absolute(self.root)
        object.__setattr__(self, "root", root)
        with _reporting("use the folder", self.url):
            Path(root).mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
            raise StoreError(f"The Store {self.url} is not readable and writable for this user; choose another folder.")

    @property
    def url(self) -> str:
        return f"file://{self.root}"

    def exists(self, path: str) -> bool:
        with _reporting("look up", self.spark_url(path)):
            return os.path.lexists(self._file(path))

    def open(self, path: str, mode: Literal["rb", "wb"]) -> BinaryIO:
        """A file for reading, or a new one that replaces ``path`` on ``close``; an error inside ``with`` drops it."""
        target = self._file(path)
        with _reporting("open", self.spark_url(path)):
            if mode == "rb":
                return target.open("rb")
            if mode == "wb":
                target.parent.mkdir(parents=True, exist_ok=True)
                return _UnfinishedFile(target, self.spark_url(path))
        raise StoreError(f"Cannot open {self.spark_url(path)} with mode {mode!r}; a Store knows 'rb' and 'wb'.")

    def list(self, path: str) -> list[str]:
        """Paths of all files below ``path`` (``""`` for the whole Store), sorted, without files still being written."""
        top = self._file(path) if path else Path(self.root)
        with _reporting("list", f"{self.url}/{path}"):
            found = []
            for folder, _, names in os.walk(top, onerror=_raise_unless_missing):
                inside = Path(folder).relative_to(self.root)
                found += [(inside / name).as_posix() for name in names if not name.endswith(_UNFINISHED)]
            return sorted(found)

    def publish(self, path: str, content: bytes) -> None:
        target = self._file(path)
        with _reporting("publish", self.spark_url(path)):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = _unfinished_name(target)
            try:
                with temporary.open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(temporary, target)  # unlike rename, fails when the name is taken
            except FileExistsError as error:
                raise StoreError(
                    f"Cannot publish {self.spark_url(path)}: it exists already, and published files are never changed. "
                    "Use another id, or delete it first."
                ) from error
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(target.parent)

    def delete(self, path: str) -> None:
        target = self._file(path)
        with _reporting("delete", self.spark_url(path)), suppress(FileNotFoundError):
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink()

    def spark_url(self, path: str) -> str:
        return f"file://{self._file(path)}"

    def arrow(self, path: str) -> tuple[fs.FileSystem, str]:
        from pyarrow import fs  # noqa: PLC0415  (a Store is cheap to import)

        return fs.LocalFileSystem(use_mmap=True), str(self._file(path))

    def _file(self, path: str) -> Path:
        if not path or "\0" in path or any(part in {"", ".", ".."} for part in path.split("/")):
            raise StoreError(
                f"{path!r} is not a path inside the Store {self.url}; use names separated by single '/', "
                "without a leading '/', '.' or '..'."
            )
        return Path(self.root, path)


class _UnfinishedFile(io.BufferedWriter):
    """A file under a hidden name that takes its real name on ``close``."""

    def __init__(self, target: Path, url: str) -> None:
        self._target = target
        self._url = url
        self._temporary = _unfinished_name(target)
        super().__init__(io.FileIO(self._temporary, "xb"))

    def close(self) -> None:
        if self.closed:
            return
        try:
            with _reporting("write", self._url):
                self.flush()
                os.fsync(self.fileno())
                super().close()
                self._temporary.replace(self._target)
                _sync_folder(self._target.parent)
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        with suppress(OSError):  # what could not be flushed is dropped on purpose
            super().close()
        with suppress(OSError):
            self._temporary.unlink()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()

    def __del__(self) -> None:
        # io's own finalizer would call close(), which makes half-written content of an abandoned file visible.
        if hasattr(self, "_temporary"):
            self._discard()


def _absolute(path_or_url: str) -> str:
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


def _unfinished_name(target: Path) -> Path:
    return target.with_name(f".{uuid.uuid4().hex}{_UNFINISHED}")


def _sync_folder(folder: Path) -> None:
    """Make a new name durable: POSIX keeps it in the folder, not in the file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def _reporting(action: str, url: str) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"Cannot {action} {url}: {error.strerror or error}.") from error
