"""Finds the Store that serves the paths and URLs of existing files."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkhvd.compat.databricks import mounted_path
from sparkhvd.errors import ConfigError, DataError
from sparkhvd.store.backends.local import absolute_path
from sparkhvd.store.backends.read_only import ReadOnlyFolder
from sparkhvd.store.options import refuse_credentials
from sparkhvd.store.protocol import Store
from sparkhvd.store.registry import has_same_backend

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?://([^/]*))?(/.*|)")


@dataclass(frozen=True)
class Access:
    """How to access file systems.

    Attributes:
        near: a Store, whose options also open files on the same kind of file system.
        storage_options: options for other file systems.
        configure: adds settings, such as the credentials of Spark's session, to a Store that is created here.
    """

    near: Store | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    configure: Callable[[Store], Store] = lambda store: store


def locate(urls: Sequence[str], access: Access) -> tuple[Store, list[str]]:
    """Return a Store that contains all of these files and folders, and their paths in it.

    Raises:
        ConfigError: one of them is not a string.
        DataError: they are on different file systems, or one of them is a whole file system.
        StoreError: no Store serves them.
    """
    for url in urls:
        if not isinstance(url, str):
            raise ConfigError(
                f"The path of Parquet files must be a string, got {type(url).__name__}: {url!r}. "
                "Pass one folder or file, such as '/data/rows' or 's3://bucket/rows'; str() converts a pathlib.Path."
            )
        refuse_credentials(url)
    parsed = [_parsed(url) for url in urls]
    if len({where for where, _ in parsed}) > 1:
        raise DataError(f"{' and '.join(urls)} are on different file systems; put them on the same one.")
    paths = [path for _, path in parsed]
    root = posixpath.commonpath([posixpath.dirname(path) for path in paths])
    if root in paths:
        raise DataError(f"There is no folder above {' and '.join(urls)}; put the rows into a folder.")
    return _store_at(parsed[0][0], root, access), [posixpath.relpath(path, root) for path in paths]


def _store_at(where: str, root: str, access: Access) -> Store:
    if where == "file:":
        return ReadOnlyFolder(root)
    url = f"{where}{root}"
    if access.near is not None and has_same_backend(url, access.near.url):
        return access.near.at(url)
    options = {} if access.storage_options is None else {"storage_options": access.storage_options}
    return access.configure(Store.create(url, **options))


def _parsed(url: str) -> tuple[str, str]:
    """Return the file system (scheme and server or bucket), and the path on it."""
    match = _URL.fullmatch(url)
    scheme = "file" if match is None else match[1].lower()
    if scheme == "file":
        return "file:", absolute_path(url)
    if scheme == "dbfs" and (mounted := mounted_path(url)) is not None:
        return "file:", absolute_path(mounted)
    assert match is not None  # noqa: S101  (other schemes come from the match)
    server, path = match[2], posixpath.normpath("/" + match[3].strip("/"))
    return (f"{scheme}:" if server is None else f"{scheme}://{server}"), path
