"""What keeps the payloads of one direction of a connection from being altered or, where that is wanted, read."""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Protocol

from sparkhvd import _core
from sparkhvd.errors import AuthenticationError, ConfigError

_SEQUENCE = struct.Struct(">Q")
_WRONG = "A frame carries a wrong tag; it was altered, replayed or sent by a stranger."


class Protection(Protocol):
    """One direction, seen from one of both ends.

    Attributes:
        overhead: by how many bytes what travels is longer than the payload.
    """

    overhead: int

    def protect(self, payload: bytes) -> bytes:
        """What travels; the sender's."""

    def checked(self, travelled: bytes) -> bytes:
        """The payload; the receiver's.

        Raises:
            AuthenticationError: the sender did not send it at this place.
        """


class Tags:
    """A tag before each payload, under a key of this direction: ``HMAC(sequence number | payload)``."""

    overhead = hashlib.sha256().digest_size

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def protect(self, payload: bytes) -> bytes:
        return self._tag(payload) + payload

    def checked(self, travelled: bytes) -> bytes:
        tag, payload = travelled[: self.overhead], travelled[self.overhead :]
        if not hmac.compare_digest(tag, self._tag(payload)):
            raise AuthenticationError(_WRONG)
        return payload

    def _tag(self, payload: bytes) -> bytes:
        content = _SEQUENCE.pack(self._count) + payload
        self._count += 1
        return tag(self._key, content)


class Encryption:
    """AES-256-GCM, by OpenSSL, with the number of the payload as the nonce.

    Raises:
        ConfigError: this host has no OpenSSL.
    """

    overhead = _core.CIPHER_TAG_BYTES

    def __init__(self, key: bytes) -> None:
        try:
            self._sealer, self._opener = _core.Sealer(key), _core.Opener(key)
        except _core.CoreError as error:
            raise ConfigError(error.args[1]) from None

    def protect(self, payload: bytes) -> bytes:
        return self._sealer.seal(payload)

    def checked(self, travelled: bytes) -> bytes:
        try:
            return self._opener.open(travelled)
        except _core.CoreError:
            raise AuthenticationError(_WRONG) from None


def require_encryption() -> None:
    """Check that this host can encrypt.

    Raises:
        ConfigError: it has no OpenSSL.
    """
    Encryption(bytes(32))


def tag(key: bytes, content: bytes) -> bytes:
    """HMAC-SHA256."""
    return hmac.new(key, content, hashlib.sha256).digest()
