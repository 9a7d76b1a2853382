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
    """A thread-safe sender of messages, created by ``connect``."""

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames
        self._lock = threading.Lock()  # held for one message, or for one request and its response

    def send(self, message: Message, deadline: Deadline) -> None:
        """Send a message without waiting for a response."""
        with self._lock:
            self._frames.send(encode(message), deadline)

    def ask(self, message: Message, deadline: Deadline) -> Message:
        """Send a message and return the response."""
        with self._lock:
            self._frames.send(encode(message), deadline)
            answer = self._frames.receive(idle=deadline)
        if answer is None:
            raise ConnectionResetError(
                f"The server closed the connection instead of answering {type(message).__name__}."
            )
        return decode(answer)

    def set_ack_timeout(self, seconds: float) -> None:
        """Break the connection when sent data stays unacknowledged for ``seconds``; for small messages only."""
        self._frames.set_ack_timeout(seconds)

    def wake(self) -> None:
        """Interrupt every wait on this connection, from any thread."""
        self._frames.wake()

    def close(self) -> None:
        self._frames.wake()
        self._frames.close()


def connect(
    addresses: Sequence[tuple[str, int]], secret: bytes, deadline: Deadline, *, encrypt: bool = False
) -> Client:
    """Return a connection to the first of ``addresses`` whose server knows ``secret``.

    Args:
        addresses: tried in order.
        secret: the shared secret.
        deadline: the end of all attempts.
        encrypt: whether to refuse a server that does not encrypt.

    Raises:
        DeadlineExceededError: no server answered; the message contains the error of each address.
        ConfigError: a server encrypts, but this host cannot.
    """
    attempts = []
    for number, address in enumerate(addresses, start=1):
        try:
            is_last = number == len(addresses)
            until = deadline if is_last else deadline.capped(_SECONDS_PER_ADDRESS)
            return Client(_open(address, secret, until, encrypt))
        except ConfigError:
            raise
        except (OSError, ValueError, OverflowError) as error:  # the last two mean an impossible host or port
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
            # Jitter keeps clients that were rejected together from retrying together.
            seconds = pause * random.uniform(0.5, 1.5)  # noqa: S311 - not a secret
            if deadline.remaining() < seconds:
                raise
            time.sleep(seconds)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _open_once(address: tuple[str, int], secret: bytes, deadline: Deadline, encrypt: bool) -> FrameSocket:
    timeout = deadline.capped(_SECONDS_PER_ADDRESS).remaining()
    connection = socket.create_connection(address, timeout=max(timeout, 0.001))
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        enable_keepalive(connection)
        return connect_handshake(connection, secret, deadline, encrypt=encrypt)
    except BaseException:
        connection.close()
        raise
