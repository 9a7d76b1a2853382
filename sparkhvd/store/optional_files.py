"""Files of a Store that another process may remove at any time."""

from __future__ import annotations

from sparkhvd.errors import StoreError
from sparkhvd.store.protocol import Store


def read_if_exists(store: Store, path: str) -> bytes | None:
    """Return the content of a file; None if there is no such file.

    Raises:
        StoreError: the file exists but cannot be read.
    """
    try:
        with store.open(path, "rb") as file:
            return bytes(file.read())
    except StoreError:
        if store.exists(path):
            raise
        return None
