"""Authentication and optional encryption of the payloads in one direction of a connection."""

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
_UNVERIFIED = "A frame failed authentication: it was altered, replayed or sent by an unauthenticated peer."


class Outgoing(Protocol):
    """The sender's side of a direction."""

    def protect(self, payload: bytes) -> bytes:
        """Return the bytes to send for the next payload."""


class Incoming(Protocol):
    """The receiver's side of a direction.

    Attributes:
        overhead: the number of bytes that protection adds to a payload.
    """

    overhead: int

    def verify(self, received: bytes) -> bytes:
        """Return the verified next payload.

        Raises:
            AuthenticationError: the sender did not send this payload at this position.
        """


def protection(encrypt: bool, outgoing_key: bytes, incoming_key: bytes) -> tuple[Outgoing, Incoming]:
    """Return both directions of one connection; its keys must serve nothing else.

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
    """The receiver's side of a ``Tagger``."""

    overhead = hashlib.sha256().digest_size

    def __init__(self, key: bytes) -> None:
        self._sender = Tagger(key)

    def verify(self, received: bytes) -> bytes:
        received_tag, payload = received[: self.overhead], received[self.overhead :]
        if not hmac.compare_digest(received_tag, self._sender.next_tag(payload)):
            raise AuthenticationError(_UNVERIFIED)
        return payload


class Sealer:
    """AES-256-GCM by OpenSSL, with the sequence number of the payload as the nonce.

    Raises:
        ConfigError: this host cannot encrypt.
    """

    def __init__(self, key: bytes) -> None:
        self._core = _new_cipher(_core.Sealer, key)

    def protect(self, payload: bytes) -> bytes:
        return self._core.seal(payload)


class Opener:
    """The receiver's side of a ``Sealer``."""

    overhead = _core.CIPHER_TAG_BYTES

    def __init__(self, key: bytes) -> None:
        self._core = _new_cipher(_core.Opener, key)

    def verify(self, received: bytes) -> bytes:
        try:
            return self._core.open(received)
        except _core.CoreError:
            raise AuthenticationError(_UNVERIFIED) from None


def _new_cipher(kind: Callable[[bytes], Cipher], key: bytes) -> Cipher:
    try:
        return kind(key)
    except _core.CoreError as error:
        raise ConfigError(error.args[1]) from None


def encryption_problem(host: str) -> str:
    """Return why the host ``host``, this one, cannot encrypt a job's traffic; empty when it can."""
    try:
        Sealer(bytes(32))
    except ConfigError as error:
        return f"Host {host} cannot encrypt the job's traffic (SPARKHVD_ENCRYPT): {error}."
    return ""


def require_encryption(host: str) -> None:
    """Check that this host can encrypt, before it sends anything.

    Raises:
        LaunchError: the host ``host``, this one, cannot encrypt.
    """
    if why := encryption_problem(host):
        raise LaunchError(why)


def tag(key: bytes, content: bytes) -> bytes:
    """Return the HMAC-SHA256 of ``content``."""
    return hmac.new(key, content, hashlib.sha256).digest()
