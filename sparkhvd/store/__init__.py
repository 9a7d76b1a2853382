"""Bytes under a URL: where prepared data, checkpoints and models live."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from sparkhvd.store.local import LocalStore as LocalStore

_HOME_OF = {"LocalStore": "sparkhvd.store.local"}

__all__ = ["LocalStore", "Store"]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'sparkhvd.store' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
