"""Options of a file system, which may contain secrets: they are pickled with the Store and never shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from sparkhvd.errors import StoreError

# A lookahead matches the rest, because in a chain of file systems it is the next URL.
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<server>[^/]*)(?=(?P<rest>.*))", re.DOTALL)
_SERVER = re.compile(r"\[[0-9A-Fa-f:.]*\](:\d*)?|[^:@]*(@[^:@]*)?(:\d*)?")
_SECRET_NAME = re.compile(
    r"key|secret|token|password|passwd|credential|connection_string|sas|auth(?!entication)", re.IGNORECASE
)
_SHORTEST_SECRET = 4  # replacing shorter texts would garble messages


class StorageOptions(Mapping[str, object]):
    """The options of a file system, such as ``{"key": ..., "secret": ..., "endpoint_url": ...}``.

    This mapping never shows its values: ``repr`` contains only the names, and ``scrubbed`` removes secrets from other
    texts.
    """

    def __init__(self, values: Mapping[str, object] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, name: str) -> object:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageOptions) and self._values == other._values

    def __hash__(self) -> int:
        return hash(frozenset(self._values))

    def __repr__(self) -> str:
        return f"StorageOptions({', '.join(sorted(self._values))}; values not shown)"

    def scrubbed(self, text: str) -> str:
        """Return ``text`` without the values of options whose names indicate secrets."""
        for secret in sorted(_secrets(self._values, named_secret=False), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


def refuse_credentials(url: str) -> None:
    """Raise ``StoreError`` for a URL with ``user:password@`` in it, without showing them.

    A password may contain a slash, so the text before a slash is not necessarily a server.
    """
    for match in _URL.finditer(url):
        if not _SERVER.fullmatch(match["server"]):
            _, at, after = (match["server"] + match["rest"]).rpartition("@")
            raise StoreError(
                f"{match['scheme']}://***{at}{after if at else ''} has credentials in it, which logs and messages "
                "would show. Pass them as storage_options."
            )


def _secrets(value: object, *, named_secret: bool) -> set[str]:
    if isinstance(value, Mapping):
        return {
            secret
            for name, inner in value.items()
            for secret in _secrets(inner, named_secret=named_secret or bool(_SECRET_NAME.search(str(name))))
        }
    return {value} if named_secret and isinstance(value, str) and len(value) >= _SHORTEST_SECRET else set()
