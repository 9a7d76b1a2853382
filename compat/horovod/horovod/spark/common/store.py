"""The Store classes, under Horovod's module name."""

from __future__ import annotations

from sparkhvd.store import DBFSLocalStore, FilesystemStore, HDFSStore, LocalStore, Store

__all__ = ["DBFSLocalStore", "FilesystemStore", "HDFSStore", "LocalStore", "Store"]
