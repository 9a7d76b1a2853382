"""Frames on a mutually authenticated connection, by the core (``core/rendezvous/frames.h``)."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from sparkhvd import _core
from sparkhvd.deadline import Deadline
from sparkhvd.errors import AuthenticationError, ConfigError, DeadlineExceededError

MAX_FRAME_BYTES = _core.MAX_MESSAGE_BYTES


class FrameSocket:
    """One authenticated connection. Sending and receiving each belong to one thread at a time."""

    def __init__(self, core: _core.FrameConnection) -> None:
        self._core = core

    def send(self, payload: bytes, deadline: Deadline) -> None:
        """Send one frame.

        Raises:
            ValueError: the payload is larger than ``MAX_FRAME_BYTES``.
            DeadlineExceededError: the other side did not receive it in time; the connection is unusable afterwards.
            ConnectionError: the other side has closed the connection.
        """
        with translated():
            self._core.send(payload, deadline.remaining())

    def receive(self, deadline: Deadline) -> bytes:
        """Return the next frame.

        Raises:
            DeadlineExceededError: it did not arrive in time.
            ConnectionError: the other side has closed the connection.
        """
        with translated():
            return self._core.receive(deadline.remaining())

    def set_ack_timeout(self, seconds: float) -> None:
        """Let the kernel break the connection when sent data stays unacknowledged for ``seconds``.

        The kernel sends no keep-alive probes while data is unacknowledged. Use it for small messages only: a peer that
        reads large messages too slowly would also break the connection.
        """
        with translated():
            self._core.set_ack_timeout(seconds)

    def fileno(self) -> int:
        """Return the descriptor, for options of the socket and to pass other descriptors."""
        return self._core.fileno()

    def wake(self) -> None:
        """Interrupt every wait on this connection, from any thread."""
        self._core.wake()

    def close(self) -> None:
        """Interrupt every wait and close the connection; in a forked child, close the child's descriptor only."""
        self._core.close()


def connect_unix(name: str, secret: bytes, deadline: Deadline) -> FrameSocket:
    """Return a connection to the Unix socket ``name`` in the abstract namespace, whose listener knows ``secret``."""
    with translated():
        return FrameSocket(_core.FrameConnection.connect_unix(name, secret, deadline.remaining()))


def accept(connection: socket.socket, secret: bytes, deadline: Deadline) -> FrameSocket:
    """Run the acceptor's side of the handshake on ``connection``, which the caller may close afterwards.

    Raises:
        AuthenticationError: the other side does not know ``secret``.
    """
    with translated():
        return FrameSocket(_core.FrameConnection.accept(connection.fileno(), secret, deadline.remaining()))


@contextmanager
def translated() -> Iterator[None]:
    """Raise the core's errors inside the block as sparkhvd's own types."""
    try:
        yield
    except _core.CoreError as error:
        code, text = error.args
        raise error_of(code, f"{text[:1].upper()}{text[1:]}.", error.errno) from None


def error_of(code: str, text: str, number: int) -> OSError | ValueError:
    """Return the exception for a failure of the core.

    Args:
        code: the code of its ``CoreError``.
        text: its message.
        number: the errno of the failed system call, or 0.
    """
    if code == "timeout":
        return DeadlineExceededError(text)
    if code == "authentication":
        return AuthenticationError(text)
    if code == "invalid_argument":
        return ConfigError(text)
    return OSError(number, text) if number else ConnectionResetError(text)


def is_host_unreachable(error: BaseException) -> bool:
    """Return whether a connection broke because the peer's host became unreachable.

    The end of a process on a reachable host causes another error, or none. Our own timeouts carry no errno.
    """
    return isinstance(error, OSError) and error.errno in {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}
