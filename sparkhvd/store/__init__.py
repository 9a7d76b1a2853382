"""Bytes under a URL: where prepared data, checkpoints and models live."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from sparkhvd.store.dbfs import DBFSLocalStore as DBFSLocalStore
    from sparkhvd.store.dbfs import DBFSStore as DBFSStore
    from sparkhvd.store.filesystem import FilesystemStore as FilesystemStore
    from sparkhvd.store.hdfs import HDFSStore as HDFSStore
    from sparkhvd.store.local import LocalStore as LocalStore
    from sparkhvd.store.s3 import S3Store as S3Store

_HOME_OF = {
    "DBFSLocalStore": "sparkhvd.store.dbfs",
    "DBFSStore": "sparkhvd.store.dbfs",
    "FilesystemStore": "sparkhvd.store.filesystem",
    "HDFSStore": "sparkhvd.store.hdfs",
    "LocalStore": "sparkhvd.store.local",
    "S3Store": "sparkhvd.store.s3",
}

__all__ = ["DBFSLocalStore", "DBFSStore", "FilesystemStore", "HDFSStore", "LocalStore", "S3Store", "Store"]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'sparkhvd.store' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
