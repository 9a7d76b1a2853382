"""Which class serves which URL scheme, as a table of strings that are resolved when they are asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType

from sparkhvd.errors import StoreError
from sparkhvd.store.protocol import Store


@dataclass(frozen=True)
class StoreEntry:
    """One backend.

    Attributes:
        target: ``"module:Class"``; the class is called with the URL and the options of ``Store.create``.
        missing: the sentence to show when the module cannot be imported: what to install.
    """

    target: str
    missing: str


STORES: Mapping[str, StoreEntry] = MappingProxyType(
    {"file": StoreEntry("sparkhvd.store.local:LocalStore", "Install pyarrow: pip install 'pyarrow>=18'.")}
)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?=/)")


def scheme_of(url: str) -> str:
    """The lower-case scheme of a URL; ``file`` for a plain path."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else "file"


def create(url: str, **options: object) -> Store:
    """The Store at ``url``; see ``Store.create``."""
    scheme = scheme_of(url)
    entry = STORES.get(scheme)
    if entry is None:
        raise StoreError(
            f"No Store serves {url!r}: its scheme {scheme!r} is not among {', '.join(sorted(STORES))}. "
            "Use a plain path or a file:// URL on a file system that the driver and all executors share."
        )
    module, _, name = entry.target.partition(":")
    try:
        backend = getattr(import_module(module), name)
    except ImportError as error:
        raise StoreError(
            f"The Store for {scheme}:// needs a package that is not installed ({error}). {entry.missing}"
        ) from error
    try:
        store: Store = backend(url, **options)
    except TypeError as error:
        raise StoreError(f"The Store at {url!r} does not take these options: {error}.") from error
    return store
