"""One authenticated connection to a ``Server``."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

from sparkhvd.deadline import Deadline
from sparkhvd.errors import ConfigError, DeadlineExceededError
from sparkhvd.rpc.frames import FrameSocket, TurnedAwayError, connect_handshake, notice_lost_peer
from sparkhvd.rpc.messages import Message, decode, encode

_SECONDS_PER_ADDRESS = 3.0
_AGAIN_SECONDS = 0.1


class Client:
    """Sends messages; safe for use from several threads. Made by ``connect``."""

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames
        self._lock = threading.Lock()  # one message, or one question and its answer, at a time

    def send(self, message: Message, deadline: Deadline) -> None:
        """Send a message that has no answer."""
        with self._lock:
            self._frames.send(encode(message), deadline)

    def ask(self, message: Message, deadline: Deadline) -> Message:
        """Send a message and wait for its answer."""
        with self._lock:
            self._frames.send(encode(message), deadline)
            answer = self._frames.receive(idle=deadline)
        if answer is None:
            raise ConnectionResetError(f"The server hung up instead of answering {type(message).__name__}.")
        return decode(answer)

    def limit_silence(self, seconds: float) -> None:
        """Break when the other host does not acknowledge for so long what was sent; for small messages only."""
        self._frames.limit_silence(seconds)

    def wake(self) -> None:
        """End every wait on this connection, from any thread."""
        self._frames.wake()

    def close(self) -> None:
        self._frames.wake()
        self._frames.close()


def connect(addresses: Sequence[tuple[str, int]], secret: bytes, deadline: Deadline) -> Client:
    """Connect to the first of ``addresses`` where a server answers that knows ``secret``.

    Raises:
        DeadlineExceededError: none did; the message says what happened at each.
        ConfigError: a server encrypts, and this host cannot.
    """
    attempts = []
    for number, address in enumerate(addresses, start=1):
        try:
            last = number == len(addresses)
            return Client(_open(address, secret, deadline if last else deadline.capped(_SECONDS_PER_ADDRESS)))
        except ConfigError:
            raise
        except (OSError, ValueError, OverflowError) as error:  # the last two: there can be no such host or port
            attempts.append(f"{address[0]}:{address[1]} ({error})")
        if deadline.expired():
            break
    raise DeadlineExceededError(f"No server answered; tried {', '.join(attempts) or 'no address'}.")


def _open(address: tuple[str, int], secret: bytes, deadline: Deadline) -> FrameSocket:
    while True:
        try:
            return _open_once(address, secret, deadline)
        except TurnedAwayError:
            if deadline.remaining() < _AGAIN_SECONDS:
                raise
            time.sleep(_AGAIN_SECONDS)


def _open_once(address: tuple[str, int], secret: bytes, deadline: Deadline) -> FrameSocket:
    reaching = deadline.capped(_SECONDS_PER_ADDRESS).remaining()
    connection = socket.create_connection(address, timeout=max(reaching, 0.001))
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_lost_peer(connection)
        return connect_handshake(connection, secret, deadline)
    except BaseException:
        connection.close()
        raise
