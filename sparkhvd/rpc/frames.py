"""Frames on a mutually authenticated stream socket.

The handshake has a fixed length in both directions, so neither side parses anything before it succeeds:

1. server to client: magic, version, whether frames are encrypted, server nonce;
2. client to server: magic, version, client nonce, HMAC(secret, "client" | encryption flag | both nonces);
3. server to client: HMAC(secret, "server" | encryption flag | both nonces).

The label inside the HMAC names the direction, so a proof cannot be reflected to its sender. Fresh nonces make replays
useless. Every later frame is ``length | protected payload`` (see ``sparkhvd.rpc.protection``) under a key for this
connection and direction. The receiver checks the payload length against the limit before it allocates memory.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import math
import secrets
import socket
import struct
from collections.abc import Callable

from sparkhvd.deadline import Deadline
from sparkhvd.errors import AuthenticationError, DeadlineExceededError
from sparkhvd.rpc.protection import Incoming, Outgoing, protection, tag

MAGIC = b"SHVD"
VERSION = 3
MAX_FRAME_BYTES = 1 << 20

_HELLO = MAGIC + struct.pack(">H", VERSION)
_NONCE_BYTES = 32
_PLAIN, _ENCRYPTED = b"\0", b"\1"
_PROOF_BYTES = 32
_BUSY_PROOF = (MAGIC * _PROOF_BYTES)[:_PROOF_BYTES]  # sent instead of the server's proof
_HEADER = struct.Struct(">I")


class ServerBusyError(ConnectionResetError):
    """The server has too many handshakes in progress; a retry may succeed."""


class FrameSocket:
    """One authenticated connection; made by ``accept_handshake`` or ``connect_handshake``.

    Sending and receiving are independent of each other; each of the two belongs to one thread at a time.
    """

    def __init__(self, connection: socket.socket, outgoing: Outgoing, incoming: Incoming) -> None:
        self._socket = connection
        self._outgoing = outgoing
        self._incoming = incoming

    def send(self, payload: bytes, deadline: Deadline) -> None:
        """Send one frame.

        Raises:
            ValueError: the payload is larger than ``MAX_FRAME_BYTES``.
            DeadlineExceededError: the other side did not receive it in time; the connection is unusable afterwards.
            ConnectionError: the other side has closed the connection.
        """
        if len(payload) > MAX_FRAME_BYTES:
            raise ValueError(f"A frame of {len(payload)} bytes exceeds the limit of {MAX_FRAME_BYTES} bytes.")
        send_all(self._socket, _HEADER.pack(len(payload)) + self._outgoing.protect(payload), deadline)

    def receive(self, idle: Deadline, frame_seconds: float = 30.0) -> bytes | None:
        """Return the next frame, or None when the peer closed the connection between two frames.

        Args:
            idle: the deadline for the first byte of a frame; a silent peer may be healthy.
            frame_seconds: the limit for the rest of the frame.
        """
        first = receive_exactly(self._socket, 1, idle, may_end=True)
        if not first:
            return None
        deadline = Deadline.after(frame_seconds)
        (length,) = _HEADER.unpack(first + receive_exactly(self._socket, _HEADER.size - 1, deadline))
        if length > MAX_FRAME_BYTES:
            raise AuthenticationError(f"A frame announces {length} bytes; the limit is {MAX_FRAME_BYTES} bytes.")
        return self._incoming.verify(receive_exactly(self._socket, length + self._incoming.overhead, deadline))

    def set_ack_timeout(self, seconds: float) -> None:
        """Let the kernel break the connection when sent data stays unacknowledged for ``seconds``.

        The kernel sends no keep-alive probes while data is unacknowledged. Use it for small messages only: a peer that
        reads slowly would also break the connection.
        """
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))

    def wake(self) -> None:
        """Interrupt every wait on this connection, from any thread."""
        shut_down(self._socket)

    def close(self) -> None:
        self._socket.close()


def accept_handshake(
    connection: socket.socket,
    secret: bytes,
    deadline: Deadline,
    *,
    encrypt: bool = False,
    admit: Callable[[], None] = lambda: None,
) -> FrameSocket:
    """Run the server's side of the handshake, which decides whether frames are encrypted.

    ``admit`` is called after the client has proved that it knows the secret, and before the server answers.

    Raises:
        AuthenticationError: the client does not know the secret.
        ConfigError: this host cannot encrypt.
        DeadlineExceededError: the client did not answer in time.
    """
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    terms = _ENCRYPTED if encrypt else _PLAIN
    send_all(connection, _HELLO + terms + own_nonce, deadline)
    answer = receive_exactly(connection, len(_HELLO) + _NONCE_BYTES + _PROOF_BYTES, deadline)
    peer_nonce = answer[len(_HELLO) : len(_HELLO) + _NONCE_BYTES]
    agreed = terms + own_nonce + peer_nonce
    proof = tag(secret, b"client" + agreed)
    if not answer.startswith(_HELLO) or not hmac.compare_digest(answer[-_PROOF_BYTES:], proof):
        raise AuthenticationError("A client could not prove that it knows the job's secret.")
    admit()
    send_all(connection, tag(secret, b"server" + agreed), deadline)
    keys = tag(secret, b"to client" + agreed), tag(secret, b"to server" + agreed)
    return FrameSocket(connection, *protection(encrypt, *keys))


def reply_busy(connection: socket.socket) -> None:
    """Ask a client to retry later, in place of the server's proof; never blocks."""
    connection.setblocking(False)
    with contextlib.suppress(OSError), connection:
        connection.send(_BUSY_PROOF)


def connect_handshake(
    connection: socket.socket, secret: bytes, deadline: Deadline, *, encrypt: bool = False
) -> FrameSocket:
    """Run the client's side of the handshake.

    Raises the errors of ``accept_handshake``, and ``ServerBusyError`` when the server asks for a retry. With
    ``encrypt``, a server that does not encrypt causes an ``AuthenticationError``.
    """
    hello = receive_exactly(connection, len(_HELLO), deadline)
    if hello != _HELLO:
        raise AuthenticationError(f"The server does not speak version {VERSION} of this protocol.")
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    agreed = receive_exactly(connection, len(_PLAIN) + _NONCE_BYTES, deadline) + own_nonce
    send_all(connection, _HELLO + own_nonce + tag(secret, b"client" + agreed), deadline)
    try:
        proof = receive_exactly(connection, _PROOF_BYTES, deadline)
    except ConnectionResetError as error:
        raise AuthenticationError(
            "The server closed the connection after it received this client's proof of the job's secret, so it belongs "
            "to another job."
        ) from error
    if hmac.compare_digest(proof, _BUSY_PROOF):
        raise ServerBusyError("The server has too many handshakes in progress and asks this client to retry.")
    if not hmac.compare_digest(proof, tag(secret, b"server" + agreed)):
        raise AuthenticationError("The server could not prove that it knows the job's secret.")
    if encrypt and not agreed.startswith(_ENCRYPTED):
        raise AuthenticationError(
            "The server does not encrypt, but this client requires encryption. Set SPARKHVD_ENCRYPT on both sides."
        )
    keys = tag(secret, b"to server" + agreed), tag(secret, b"to client" + agreed)
    return FrameSocket(connection, *protection(agreed.startswith(_ENCRYPTED), *keys))


def receive_exactly(connection: socket.socket, count: int, deadline: Deadline, may_end: bool = False) -> bytes:
    """Return exactly ``count`` bytes, or none when ``may_end`` and the connection ended before the first byte."""
    received = bytearray()
    while len(received) < count:
        _limit(connection, deadline, f"{count - len(received)} more bytes of {count}")
        try:
            piece = connection.recv(min(count - len(received), 1 << 16))
        except TimeoutError as error:
            if is_host_unreachable(error):
                raise
            continue  # _limit raises once the deadline has passed
        if not piece:
            if may_end and not received:
                return b""
            raise ConnectionResetError(f"The connection ended after {len(received)} of {count} bytes.")
        received += piece
    return bytes(received)


def send_all(connection: socket.socket, content: bytes, deadline: Deadline) -> None:
    """Send everything before the deadline."""
    view = memoryview(content)
    while view:
        _limit(connection, deadline, f"the peer to accept {len(view)} bytes")
        try:
            view = view[connection.send(view) :]
        except TimeoutError as error:
            if is_host_unreachable(error):
                raise


def enable_keepalive(connection: socket.socket) -> None:
    """Let the kernel break a connection within about 9 seconds after the peer's host became unreachable."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def is_host_unreachable(error: BaseException) -> bool:
    """Return whether the kernel broke a connection because the peer's host became unreachable.

    The end of a process on a reachable host causes another error, or none. Our own timeouts carry no errno.
    """
    return isinstance(error, OSError) and error.errno in {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}


def shut_down(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Interrupt every wait on a socket, from any thread; closing it would leave other threads waiting."""
    try:
        connection.shutdown(how)
    except OSError:
        return  # it was not connected any more, so no thread waits


def stop_receiving(connection: socket.socket) -> None:
    """Interrupt every wait for data from the peer; pending data is still sent."""
    shut_down(connection, socket.SHUT_RD)


def _limit(connection: socket.socket, deadline: Deadline, waiting_for: str) -> None:
    remaining = deadline.remaining()
    if remaining <= 0:
        raise DeadlineExceededError(f"Timed out waiting for {waiting_for}.")
    connection.settimeout(None if math.isinf(remaining) else remaining)
