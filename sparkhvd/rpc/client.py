"""One authenticated connection to a ``Server``."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from sparkhvd import _core
from sparkhvd._util.addresses import with_port
from sparkhvd.deadline import Deadline
from sparkhvd.errors import ConfigError, DeadlineExceededError
from sparkhvd.rpc.frames import FrameSocket, translated
from sparkhvd.rpc.messages import Message, decode, encode

_LARGEST_PORT = (1 << 16) - 1


class Client:
    """A thread-safe sender of messages, created by ``connect``."""

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames
        self._sending = threading.Lock()
        self._asking = threading.Lock()  # held for one request and its response; acquired before _sending

    def send(self, message: Message, deadline: Deadline) -> None:
        """Send a message without waiting for a response."""
        with self._sending:
            self._frames.send(encode(message), deadline)

    def ask(self, message: Message, deadline: Deadline) -> Message:
        """Send a message and return the response. Meanwhile, other threads can call ``send``; ``ask`` blocks them."""
        with self._asking:
            self.send(message, deadline)
            return decode(self._frames.receive(deadline))

    def set_ack_timeout(self, seconds: float) -> None:
        """Break the connection when sent data stays unacknowledged for ``seconds``; for small messages only."""
        self._frames.set_ack_timeout(seconds)

    def wake(self) -> None:
        """Interrupt every wait on this connection, from any thread."""
        self._frames.wake()

    def close(self) -> None:
        self._frames.close()


def connect(
    addresses: Sequence[tuple[str, int]], secret: bytes, deadline: Deadline, *, encrypt: bool = False
) -> Client:
    """Return a connection to one of ``addresses`` whose server knows ``secret``.

    Args:
        addresses: the addresses, the preferred one first. If earlier addresses do not answer at once, later ones are
            tried as well.
        secret: the shared secret.
        deadline: the end of all attempts.
        encrypt: whether to refuse a server that does not encrypt.

    Raises:
        DeadlineExceededError: no server answered; the message contains the error of each address.
        ConfigError: a server encrypts, but this host cannot.
    """
    valid = [(host, port) for host, port in addresses if 0 < port <= _LARGEST_PORT]
    problems = [f"{with_port(*address)}: the port is out of range" for address in addresses if address not in valid]
    if valid:
        try:
            with translated():
                core = _core.FrameConnection.connect(valid, secret, deadline.remaining(), encrypt)
            return Client(FrameSocket(core))
        except ConfigError:
            raise
        except OSError as error:
            problems.append((error.strerror or str(error)).removesuffix("."))
    raise DeadlineExceededError(f"No server answered; tried {'; '.join(problems) or 'no address'}.")
