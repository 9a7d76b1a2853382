"""What keeps the payloads of one direction of a connection from being altered or, where that is wanted, read."""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from typing import Protocol, TypeVar

from sparkhvd import _core
from sparkhvd.errors import AuthenticationError, ConfigError, LaunchError

Cipher = TypeVar("Cipher")

_SEQUENCE = struct.Struct(">Q")
_WRONG = "A frame failed authentication: it was altered, replayed or sent by an unauthenticated peer."


class Outgoing(Protocol):
    """The sender's side of a direction."""

    def protect(self, payload: bytes) -> bytes:
        """What travels in the place of the next payload."""


class Incoming(Protocol):
    """The receiver's side of a direction.

    Attributes:
        overhead: by how many bytes what travels is longer than the payload.
    """

    overhead: int

    def checked(self, travelled: bytes) -> bytes:
        """The next payload.

        Raises:
            AuthenticationError: the sender did not send it at this place.
        """


def protection(encrypt: bool, outgoing_key: bytes, incoming_key: bytes) -> tuple[Outgoing, Incoming]:
    """Both directions of one connection, whose keys serve nothing else.

    Raises:
        ConfigError: this host cannot encrypt.
    """
    return (Sealer(outgoing_key), Opener(incoming_key)) if encrypt else (Tagger(outgoing_key), TagCheck(incoming_key))


class Tagger:
    """A tag before each payload: ``HMAC(key, sequence number | payload)``."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def protect(self, payload: bytes) -> bytes:
        return self.next_tag(payload) + payload

    def next_tag(self, payload: bytes) -> bytes:
        content = _SEQUENCE.pack(self._count) + payload
        self._count += 1
        return tag(self._key, content)


class TagCheck:
    """The other end of a ``Tagger``."""

    overhead = hashlib.sha256().digest_size

    def __init__(self, key: bytes) -> None:
        self._sender = Tagger(key)

    def checked(self, travelled: bytes) -> bytes:
        found, payload = travelled[: self.overhead], travelled[self.overhead :]
        if not hmac.compare_digest(found, self._sender.next_tag(payload)):
            raise AuthenticationError(_WRONG)
        return payload


class Sealer:
    """AES-256-GCM by OpenSSL, with the number of the payload as the nonce.

    Raises:
        ConfigError: this host cannot encrypt.
    """

    def __init__(self, key: bytes) -> None:
        self._core = _made(_core.Sealer, key)

    def protect(self, payload: bytes) -> bytes:
        return self._core.seal(payload)


class Opener:
    """The other end of a ``Sealer``."""

    overhead = _core.CIPHER_TAG_BYTES

    def __init__(self, key: bytes) -> None:
        self._core = _made(_core.Opener, key)

    def checked(self, travelled: bytes) -> bytes:
        try:
            return self._core.open(travelled)
        except _core.CoreError:
            raise AuthenticationError(_WRONG) from None


def _made(kind: Callable[[bytes], Cipher], key: bytes) -> Cipher:
    try:
        return kind(key)
    except _core.CoreError as error:
        raise ConfigError(error.args[1]) from None


def encryption_problem(host: str) -> str:
    """Why this host, of this name, cannot encrypt what a job sends; empty where it can."""
    try:
        Sealer(bytes(32))
    except ConfigError as error:
        return f"Host {host} cannot encrypt the job's traffic (SPARKHVD_ENCRYPT): {error}."
    return ""


def require_encryption(host: str) -> None:
    """Check it before anything is sent.

    Raises:
        LaunchError: this host, of this name, cannot encrypt.
    """
    if why := encryption_problem(host):
        raise LaunchError(why)


def tag(key: bytes, content: bytes) -> bytes:
    """HMAC-SHA256."""
    return hmac.new(key, content, hashlib.sha256).digest()
