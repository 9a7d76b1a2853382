"""Bytes under a URL: where prepared data, checkpoints and models live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkhvd.errors import ParamError
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from sparkhvd.store.backends.dbfs import DBFSLocalStore as DBFSLocalStore
    from sparkhvd.store.backends.dbfs import DBFSStore as DBFSStore
    from sparkhvd.store.backends.filesystem import FilesystemStore as FilesystemStore
    from sparkhvd.store.backends.hdfs import HDFSStore as HDFSStore
    from sparkhvd.store.backends.local import LocalStore as LocalStore
    from sparkhvd.store.backends.s3 import S3Store as S3Store

# A scheme that each class serves, by the name of the class.
_SCHEMES = {
    "DBFSLocalStore": "dbfs",
    "DBFSStore": "dbfs",
    "FilesystemStore": "",
    "HDFSStore": "hdfs",
    "LocalStore": "file",
    "S3Store": "s3",
}

__all__ = ["DBFSLocalStore", "DBFSStore", "FilesystemStore", "HDFSStore", "LocalStore", "S3Store", "Store"]


def store_at(name: str, value: object) -> Store:
    """Return the Store for the argument ``name``, which is a Store, or the URL or path of one.

    Raises:
        ParamError: the value has another type.
        StoreError: there cannot be a Store at this URL.
    """
    if isinstance(value, str):
        return Store.create(value)
    if not isinstance(value, Store):
        raise ParamError(f"{name} must be a Store or a URL such as 'file:///some/folder', got {type(value).__name__}.")
    return value


def __getattr__(name: str) -> object:
    if name not in _SCHEMES:
        raise AttributeError(f"module 'sparkhvd.store' has no attribute {name!r}")
    from sparkhvd.store.registry import backend_of  # noqa: PLC0415  (importing this module loads no Store)

    return backend_of(_SCHEMES[name])


def __dir__() -> list[str]:
    return sorted([*globals(), *_SCHEMES])
