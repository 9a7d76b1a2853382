"""A check that a Store is shared: one machine writes a token, and the others read it and answer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from sparkhvd.errors import StoreError
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store


@dataclass(frozen=True)
class StoreProbe:
    """A token that the driver writes into a Store.

    Attributes:
        store: the Store.
        folder: the folder of the token and of the answers to it.
        token: the content, which no file of the same name on another machine has.
    """

    store: Store
    folder: str
    token: bytes = field(repr=False)

    @property
    def _path(self) -> str:
        return f"{self.folder}/token"

    def leave(self) -> None:
        """Write the token."""
        self.store.publish(self._path, self.token)

    def answer(self, name: str) -> str:
        """Read the token and write an answer ``name``; return the problem, or an empty text.

        Errors are returned, not raised, because another process reports them.
        """
        try:
            if not self.store.exists(self._path):
                return "does not see a file that the driver has just written"
            with self.store.open(self._path, "rb") as file:
                if file.read() != self.token:
                    return "sees another file than the one that the driver has just written"
            with self.store.open(f"{self.folder}/answers/{name}", "wb") as file:
                file.write(self.token)
        except StoreError as error:
            return f"cannot use it: {error}"
        return ""

    def unseen(self, names: list[str]) -> list[str]:
        """Return the ``names`` whose answers are not visible here."""
        seen = {path.rpartition("/")[2] for path in self.store.list(f"{self.folder}/answers")}
        return [name for name in names if name not in seen]

    def remove(self) -> None:
        """Remove the token and all answers."""
        self.store.delete(self.folder)


def new_store_probe(store: Store) -> StoreProbe:
    """Return a new probe."""
    return StoreProbe(store, layout.probe_folder(secrets.token_hex(8)), secrets.token_bytes(16))
