"""One authenticated connection to a ``Server``."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Sequence

from sparkhvd._util.addresses import with_port
from sparkhvd.deadline import Deadline
from sparkhvd.errors import ConfigError, DeadlineExceededError
from sparkhvd.rpc.frames import FrameSocket, ServerBusyError, connect_handshake, enable_keepalive
from sparkhvd.rpc.messages import Message, decode, encode

_SECONDS_PER_ADDRESS = 3.0
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0


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
            raise ConnectionResetError(
                f"The server closed the connection instead of answering {type(message).__name__}."
            )
        return decode(answer)

    def set_ack_timeout(self, seconds: float) -> None:
        """Break when the other host does not acknowledge for so long what was sent; for small messages only."""
        self._frames.set_ack_timeout(seconds)

    def wake(self) -> None:
        """End every wait on this connection, from any thread."""
        self._frames.wake()

    def close(self) -> None:
        self._frames.wake()
        self._frames.close()


def connect(
    addresses: Sequence[tuple[str, int]], secret: bytes, deadline: Deadline, *, encrypt: bool = False
) -> Client:
    """Connect to the first of ``addresses`` where a server answers that knows ``secret``.

    Args:
        addresses: tried in order.
        secret: the shared secret.
        deadline: when to give up.
        encrypt: whether a server that does not encrypt is refused.

    Raises:
        DeadlineExceededError: none did; the message says what happened at each.
        ConfigError: a server encrypts, and this host cannot.
    """
    attempts = []
    for number, address in enumerate(addresses, start=1):
        try:
            last = number == len(addresses)
            until = deadline if last else deadline.capped(_SECONDS_PER_ADDRESS)
            return Client(_open(address, secret, until, encrypt))
        except ConfigError:
            raise
        except (OSError, ValueError, OverflowError) as error:  # the last two: there can be no such host or port
            attempts.append(f"{with_port(*address)} ({error})")
        if deadline.expired():
            break
    raise DeadlineExceededError(f"No server answered; tried {', '.join(attempts) or 'no address'}.")


def _open(address: tuple[str, int], secret: bytes, deadline: Deadline, encrypt: bool) -> FrameSocket:
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            return _open_once(address, secret, deadline, encrypt)
        except ServerBusyError:
            # Those who were turned away together must not come together again.
            seconds = pause * random.uniform(0.5, 1.5)  # noqa: S311 - nothing to guess
            if deadline.remaining() < seconds:
                raise
            time.sleep(seconds)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _open_once(address: tuple[str, int], secret: bytes, deadline: Deadline, encrypt: bool) -> FrameSocket:
    reaching = deadline.capped(_SECONDS_PER_ADDRESS).remaining()
    connection = socket.create_connection(address, timeout=max(reaching, 0.001))
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        enable_keepalive(connection)
        return connect_handshake(connection, secret, deadline, encrypt=encrypt)
    except BaseException:
        connection.close()
        raise
