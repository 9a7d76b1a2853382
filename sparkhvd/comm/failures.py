"""Translation of the core's failures into the types of ``sparkhvd.errors``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sparkhvd._core import CoreError
from sparkhvd.errors import (
    AuthenticationError,
    CollectiveError,
    ConfigError,
    DeadlineExceededError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    SparkHvdError,
)

_TYPE_OF: dict[str, type[SparkHvdError]] = {
    "invalid_argument": ConfigError,
    "mismatch": MismatchError,
    "timeout": DeadlineExceededError,
    "aborted": PeerLostError,
    "peer_lost": PeerLostError,
    "io": CollectiveError,
    "authentication": AuthenticationError,
    "shut_down": NotInitializedError,
    "internal": CollectiveError,
}


def translate(error: CoreError) -> SparkHvdError:
    """Return sparkhvd's exception with the message of the core's ``error``; unknown codes become ``CollectiveError``.

    Raise it ``from None``: otherwise a traceback would begin with the core's error.
    """
    code, message = error.args
    return _TYPE_OF.get(code, CollectiveError)(message)


@contextmanager
def translated() -> Iterator[None]:
    """Raise the core's errors inside the block as sparkhvd's own types."""
    try:
        yield
    except CoreError as error:
        raise translate(error) from None
