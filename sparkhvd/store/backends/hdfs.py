"""A Store on HDFS, through a client that needs neither Java nor libhdfs."""

from __future__ import annotations

import io
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, ClassVar

from fsspec import AbstractFileSystem
from hdfs_native import Client, FileReader, FileStatus, WriteOptions
from hdfs_native.fsspec import HdfsFileSystem

from sparkhvd.config import hadoop_token_file, hadoop_user_name
from sparkhvd.errors import StoreError
from sparkhvd.store.access.delegation_tokens import name_with_token
from sparkhvd.store.access.kerberos_ticket import principal_of
from sparkhvd.store.access.remote_file import SPOOL_BYTES, Ranges
from sparkhvd.store.access.retry import is_transient
from sparkhvd.store.backends.filesystem import FilesystemStore
from sparkhvd.store.folders import LEFTOVER_SECONDS, UNFINISHED

# By default, the client retries an unresponsive name node for minutes. The Store has a deadline of its own.
_CLIENT_DEFAULTS = {
    "dfs.client.failover.max.attempts": "3",
    "dfs.client.failover.sleep.base.millis": "100",
    "dfs.client.failover.sleep.max.millis": "1000",
}
_TRANSIENT = re.compile(
    r"DataTransferError|StandbyException|SafeModeException|RetriableException|Timeout|timed out|in time"
)
_SERVER_ERROR = re.compile(r'RPCError\("[\w.$]*", "(.*)"\)', re.DOTALL)
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(//(?P<authority>[^/]*))?(?P<folder>.*)", re.DOTALL)
# The Hadoop settings that the client reads: they select the name nodes and the protocol.
_CLIENT_SETTING = re.compile(
    r"fs\.defaultFS$|dfs\.(ha\.namenodes|namenode\.rpc-address|client\.failover\.proxy\.provider)\.|"
    r"dfs\.data\.transfer\.protection$|dfs\.client\.use\.datanode\.hostname$|hadoop\.security\.authentication$|"
    r"fs\.viewfs\.mounttable\."
)
_SEND_BYTES = 4 * 1024 * 1024
# Storage options that are not Hadoop settings.
_USER, _TICKET = "user", "kerb_ticket"
_DEFAULT = "fs.defaultFS"


class HDFSStore(FilesystemStore):
    """A Store on HDFS.

    Paths can be ``hdfs://namenode:8020/folder``, ``hdfs://nameservice/folder``, ``hdfs:///folder`` or ``/folder``. The
    last two are on the default file system of the Hadoop configuration (``HADOOP_CONF_DIR``). Files are written under a
    hidden name and then renamed. If several writers publish the same file, the name node accepts only one rename.

    With Kerberos (``hadoop.security.authentication``), the client uses the name node's delegation token from Hadoop's
    token file (``HADOOP_TOKEN_FILE_LOCATION``), which YARN provides in every container. Without a token, it uses a
    ticket.

    Args:
        prefix_path: the folder; None if the paths in ``paths`` are enough.
        host: the name node or name service, which replaces the one in the URL; ``"default"`` keeps the URL's.
        port: the name node's port; None or 0 for a name service.
        user: the user on a cluster without Kerberos. The client takes the user of all connections from the environment
            variable ``HADOOP_USER_NAME`` (by default, the login name); this argument only checks that it is this user.
        kerb_ticket: the Kerberos ticket cache to use.
        driver: must be None. In Horovod, it chooses the client; sparkhvd has only one.
        extra_conf: Hadoop settings for the client, such as ``dfs.ha.namenodes.<name service>``.
        storage_options: more Hadoop settings for the client; ``extra_conf`` takes precedence.
        paths: ``train_path``, ``val_path``, ``test_path``, ``runs_path``, ``save_runs`` and ``retry_seconds`` as in
            ``FilesystemStore``; the paths may omit the scheme.

    Raises:
        StoreError: a path is not on HDFS, no path is set, or ``driver`` is set.
    """

    _opens_with_info: ClassVar[bool] = False

    def __init__(  # noqa: PLR0917  (the order of the arguments is Horovod's)
        self,
        prefix_path: str | None = None,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str | None = None,
        extra_conf: Mapping[str, str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        **paths: Any,
    ) -> None:
        if driver is not None:
            raise StoreError(f"HDFSStore does not support driver={driver!r}: it has only one client. Leave driver out.")
        authority = "" if host in {None, "default"} else f"{host}:{port}" if port else str(host)
        for name in ("train_path", "val_path", "test_path", "runs_path"):
            if name in paths:
                paths[name] = _hdfs_url(paths[name], authority)
        own = {_USER: user, _TICKET: kerb_ticket}
        options = {**(storage_options or {}), **(extra_conf or {}), **{k: v for k, v in own.items() if v is not None}}
        super().__init__(_hdfs_url(prefix_path, authority), storage_options=options, **paths)

    def spark_options(self) -> dict[str, str]:
        return {name: str(value) for name, value in self._client_options().items()}

    def with_spark_settings(self, settings: Mapping[str, str]) -> HDFSStore:
        client_settings = {name: value for name, value in settings.items() if _CLIENT_SETTING.match(name)}
        if not client_settings.get(_DEFAULT, "").startswith(("hdfs:", "viewfs:")):
            client_settings.pop(_DEFAULT, None)  # Spark's built-in default must not hide the one in Hadoop's files
        return replace(self, storage_options={**client_settings, **(self.storage_options or {})})

    def _normalized(self, url: str) -> str:
        return super()._normalized(str(_hdfs_url(url, "")))

    def _base_of(self, url: str) -> str:
        return url[: -len(folder)] if (folder := self._location_of_url(url)) else url

    def _location_of_url(self, url: str) -> str:
        _, slash, folder = url.partition("://")[2].partition("/")
        return f"{slash}{folder}".rstrip("/")

    def _client_options(self) -> dict[str, object]:
        return {name: value for name, value in (self.storage_options or {}).items() if name not in {_USER, _TICKET}}

    def _new_filesystem(self) -> Any:
        options = self.storage_options or {}
        if options.get(_USER, hadoop_user_name()) != hadoop_user_name():
            raise StoreError(
                f"{self.url} was opened with user={options[_USER]!r}, but HADOOP_USER_NAME is {hadoop_user_name()!r} "
                "in this process. Set it for the driver and the executors (spark.executorEnv.HADOOP_USER_NAME)."
            )
        settings = _CLIENT_DEFAULTS | {name: str(value) for name, value in self._client_options().items()}
        filesystem = _Hdfs()
        scheme, _, authority = self._base.partition("://")
        location = f"{scheme}://{name_with_token(authority, hadoop_token_file())}"
        default_scheme, _, default = settings.get(_DEFAULT, "").partition("://")
        if default_scheme == "hdfs":
            settings[_DEFAULT] = f"hdfs://{name_with_token(default.rstrip('/'), hadoop_token_file())}"
        ticket = options.get(_TICKET)
        principal = None if ticket is None else principal_of(str(ticket))
        filesystem.client = Client(location, settings, kerberos_principal=principal, kerberos_cache=ticket)
        return filesystem

    def _is_transient(self, error: Exception) -> bool:
        if isinstance(error, RuntimeError):  # the client's type for errors without a Python type of their own
            return bool(_TRANSIENT.search(str(error)))
        return is_transient(error)

    def _explain(self, error: Exception) -> str:
        server_error = _SERVER_ERROR.search(str(error)) if isinstance(error, RuntimeError) else None
        return super()._explain(RuntimeError(server_error[1].partition("\\n")[0]) if server_error else error)

    def _ranges(self, location: str) -> Ranges:
        return _HdfsRanges(self._filesystem().client.read(location))

    def _find(self, top: str, _: int) -> Iterable[str]:
        # The client's own recursion fails if another process removes one of the folders meanwhile.
        files: list[str] = []
        folders = [top or "/"]
        while folders:
            with suppress(FileNotFoundError):
                for entry in self._filesystem().client.list_status(folders.pop(), False):
                    (folders if entry.isdir else files).append(entry.path)
                    _remove_if_leftover(self._filesystem().client, entry)
        return files

    def _create(self, filesystem: Any, location: str, content: bytes, name: str) -> None:  # noqa: ARG002
        folder = location.rpartition("/")[0]
        hidden = _hidden(location)
        with _removed_after_failure(filesystem.client, hidden):
            _write(filesystem.client, hidden, io.BytesIO(content))
            _rename(filesystem.client, hidden, location, overwrite=False)
        _remove_leftovers(filesystem.client, folder)

    def _send(self, filesystem: Any, location: str, content: IO[bytes], size: int) -> None:
        hidden = _hidden(location)
        with _own_view(content, size) as own, _removed_after_failure(filesystem.client, hidden):
            _write(filesystem.client, hidden, own)
            if self._filesystem() is not filesystem:
                raise TimeoutError  # this attempt was abandoned and must not replace a newer file
            _rename(filesystem.client, hidden, location, overwrite=True)

    def _remove(self, filesystem: Any, location: str) -> None:
        filesystem.client.delete(location, True)


class _Hdfs(HdfsFileSystem):
    """The client's fsspec class, with literal paths: a ``#`` or ``?`` is part of a name."""

    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def __init__(self) -> None:
        AbstractFileSystem.__init__(self)  # the client is set afterwards
        self.host = self.port = None


class _HdfsRanges:
    info = None

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self.size = len(reader)

    def read(self, start: int, stop: int) -> bytes:
        return self._reader.read_range(start, stop - start)


def _hdfs_url(path: str | None, authority: str) -> str | None:
    """Return ``path`` as a URL, on the name node ``authority`` if it is set."""
    if path is None:
        return None
    scheme, folder, own = "hdfs", path, ""
    if url := _URL.fullmatch(path):
        scheme, own, folder = url["scheme"].lower(), url["authority"] or "", url["folder"]
    if scheme not in {"hdfs", "viewfs"} or not (folder.startswith("/") or (own and not folder)):
        raise StoreError(
            f"{path!r} is not a folder on HDFS; use hdfs://namenode:port/folder, hdfs:///folder, or an absolute path."
        )
    return f"{scheme}://{authority or own}{folder}"


def _hidden(location: str) -> str:
    """Return a new hidden name, because an earlier attempt may have created its file although its response was lost."""
    return f"{location.rpartition('/')[0]}/.{uuid.uuid4().hex}{UNFINISHED}"


def _own_view(content: IO[bytes], size: int) -> IO[bytes]:
    """Return the content with its own position, because an abandoned attempt may still be reading."""
    if size <= SPOOL_BYTES:
        return io.BytesIO(content.read(size))
    return Path(f"/proc/self/fd/{content.fileno()}").open("rb")


def _write(client: Client, location: str, content: IO[bytes]) -> None:
    """Write a file with a new hidden name; the client repeats a request whose response is lost, so it may exist."""
    with client.create(location, WriteOptions(overwrite=True, create_parent=True)) as file:
        while piece := content.read(_SEND_BYTES):
            file.write(piece)


def _rename(client: Client, hidden: str, location: str, *, overwrite: bool) -> None:
    """Rename a file; the client repeats a request whose response is lost, and the file is then no longer there."""
    written = client.get_file_info(hidden)
    try:
        client.rename(hidden, location, overwrite=overwrite)
    except (OSError, RuntimeError):
        if not _is_renamed(client, written, location):
            raise


def _is_renamed(client: Client, written: FileStatus, location: str) -> bool:
    """Return whether the file at a location is ``written``, which no longer has its hidden name."""
    with suppress(FileNotFoundError):
        client.get_file_info(written.path)
        return False
    found = client.get_file_info(location)
    return bool((found.length, found.modification_time) == (written.length, written.modification_time))


@contextmanager
def _removed_after_failure(client: Client, location: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError, RuntimeError):  # the original failure is the one to report
            client.delete(location, False)
        raise


def _remove_leftovers(client: Client, folder: str) -> None:
    """Remove the files in a folder that killed writers have left."""
    with suppress(OSError, RuntimeError):  # other writers may remove the folder
        for entry in client.list_status(folder or "/", False):
            _remove_if_leftover(client, entry)


def _remove_if_leftover(client: Client, entry: FileStatus) -> None:
    """Remove a file or folder if it is an unfinished file whose writer was killed long ago."""
    before = (time.time() - LEFTOVER_SECONDS) * 1000
    if entry.path.endswith(UNFINISHED) and not entry.isdir and entry.modification_time < before:
        with suppress(OSError, RuntimeError):  # other writers may remove it, too, or this one may only read
            client.delete(entry.path, False)
