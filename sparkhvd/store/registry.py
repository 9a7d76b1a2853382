"""The table of Store classes by URL scheme, as strings that are imported on use.

Other packages add classes by entry points, see ``sparkhvd._util.registry``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

from sparkhvd._util.registry import Registry
from sparkhvd.compat.databricks import mounted_path
from sparkhvd.config import runs_on_databricks
from sparkhvd.errors import StoreError
from sparkhvd.store.options import refuse_credentials


@dataclass(frozen=True)
class StoreEntry:
    """One backend.

    Attributes:
        target: ``"module:Class"``; the class is called with the URL and the options of ``Store.create``.
        missing: the advice if a package is missing.
    """

    target: str
    missing: str


_S3 = StoreEntry("sparkhvd.store.backends.s3:S3Store", "Install s3fs: pip install 'sparkhvd[s3]'.")
_HDFS = StoreEntry("sparkhvd.store.backends.hdfs:HDFSStore", "Install hdfs-native: pip install 'sparkhvd[hdfs]'.")

STORES: Mapping[str, StoreEntry] = MappingProxyType(
    {
        "file": StoreEntry("sparkhvd.store.backends.local:LocalStore", "Install pyarrow: pip install 'pyarrow>=14'."),
        "dbfs": StoreEntry("sparkhvd.store.backends.dbfs:DBFSStore", "Install pyarrow: pip install 'pyarrow>=14'."),
        "hdfs": _HDFS,
        "viewfs": _HDFS,
        "s3": _S3,
        "s3a": _S3,
        "s3n": _S3,
    }
)
_ADDED = Registry("sparkhvd.stores", {})  # by scheme, from other packages
# Serves every other scheme that fsspec knows.
ANY_OTHER = StoreEntry("sparkhvd.store.backends.filesystem:FilesystemStore", "Install fsspec: pip install 'fsspec'.")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?=/)")


def scheme_of(url: str) -> str:
    """Return the lower-case scheme of a URL; ``file`` for a path, and ``dbfs`` for mounted paths on Databricks."""
    match = _SCHEME.match(url)
    scheme = match[1].lower() if match else "file"
    if scheme == "file" and runs_on_databricks():
        return "dbfs" if mounted_path(url) is not None else scheme
    return scheme


def has_same_backend(url: str, other: str) -> bool:
    """Return whether one Store class serves both URLs, so that the same options open them."""
    one, two = scheme_of(url), scheme_of(other)
    return one == two or (one in STORES and STORES.get(one) == STORES.get(two))


def backend_of(scheme: str) -> Any:
    """Return the class that serves a scheme.

    Raises:
        StoreError: a package is missing.
    """
    entry = STORES.get(scheme) or _added(scheme) or ANY_OTHER
    try:
        return resolve_name(entry.target)
    except ImportError as error:
        raise StoreError(
            f"The Store for {scheme}:// needs a package that is not installed ({error}). {entry.missing}"
        ) from error


def _added(scheme: str) -> StoreEntry | None:
    target = _ADDED.target(scheme)
    return None if target is None else StoreEntry(target, f"The entry point {scheme!r} of sparkhvd.stores names it.")


def create(url: str, **options: object) -> object:
    """Return the object that serves ``url``; see ``Store.create``."""
    if not isinstance(url, str):
        raise StoreError(f"The URL of a Store must be a string, got {type(url).__name__} {url!r}. Pass it as str(...).")
    refuse_credentials(url)
    if scheme_of(url) in {"http", "https"}:
        raise StoreError(
            f"There cannot be a Store at {url!r}: HTTP servers take no files. Use s3://, hdfs:// or a path."
        )
    if scheme_of(url) == "local":
        raise StoreError(
            f"The scheme of {url!r} is known to fsspec only. Pass file://{url.partition('://')[2]} instead."
        )
    backend = backend_of(scheme_of(url))
    try:
        return backend(url, **options)
    except TypeError as error:
        raise StoreError(f"The Store at {url!r} does not accept these options: {error}.") from error
