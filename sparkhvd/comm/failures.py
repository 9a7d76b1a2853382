"""The one place where failures of the compiled core become the types of ``sparkhvd.errors``."""

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
    """The exception of ours that says what the core's ``error`` says; unknown codes become ``CollectiveError``."""
    code, message = error.args
    return _TYPE_OF.get(code, CollectiveError)(message)


@contextmanager
def translated() -> Iterator[None]:
    """Raise what the core reports inside the block as our own types, with the core's error as the cause."""
    try:
        yield
    except CoreError as error:
        raise translate(error) from error
