"""A server of authenticated connections: one thread accepts, and each connection has a thread."""

from __future__ import annotations

import errno
import logging
import math
import resource
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from sparkhvd._util.closable import Closable
from sparkhvd._util.file_descriptors import allow_more_files
from sparkhvd.deadline import Deadline
from sparkhvd.errors import DeadlineExceededError, SparkHvdError
from sparkhvd.rpc.fields import MessageError
from sparkhvd.rpc.frames import (
    FrameSocket,
    accept_handshake,
    enable_keepalive,
    is_host_unreachable,
    reply_busy,
    shut_down,
    stop_receiving,
)
from sparkhvd.rpc.messages import Message, TaskStatus, decode, encode

logger = logging.getLogger(__name__)

# Unauthenticated peers hold at most this many threads, each for at most the time of a handshake. A handshake may be
# rejected to make room once its undisturbed time is over, oldest first; other peers wait in the kernel's queue.
_MAX_UNPROVEN = 32
_HANDSHAKE_SECONDS = 5.0
_UNDISTURBED_SECONDS = 0.25
_QUEUE = 4096  # the kernel limits it to net.core.somaxconn
_REPLY_SECONDS = 30.0
_LAST_ANSWER_SECONDS = 2.0
_SHORT_OF_FILES_SECONDS = 0.1
# The longest silence of a task. An overloaded host, or one that is being migrated, may be late.
SILENT_SECONDS = 60.0
# The time for the kernel of a task's host to acknowledge data sent to the task.
UNANSWERED_SECONDS = 9.0


class Handler(Protocol):
    """A handler of messages, called from the threads of several connections at once."""

    def handle(self, message: Message) -> Message | Future[Message] | None:
        """Handle ``message`` and return the reply to its sender, a future of it, or None."""


class Server(Closable):
    """A server from construction until ``close()``, for holders of ``secret`` only.

    Args:
        secret: the shared secret.
        handler: receives every message.
        host: the local address to bind; no other interface listens.
        port: 0 takes a free one.
        name: prefix of the threads' names.
        encrypt: whether connections are encrypted; clients follow. See ``require_encryption``.
        on_lost: called with the last ``TaskStatus`` of a connection and its error, if the peer's host became
            unreachable, or its task sent nothing for ``SILENT_SECONDS`` while it awaited no response.
    """

    def __init__(  # noqa: PLR0917
        self,
        secret: bytes,
        handler: Handler,
        host: str = "127.0.0.1",
        port: int = 0,
        name: str = "sparkhvd-rpc",
        on_lost: Callable[[TaskStatus, OSError], None] | None = None,
        *,
        encrypt: bool = False,
    ) -> None:
        self._secret = secret
        self._encrypt = encrypt
        self._on_lost = on_lost
        self._handler = handler
        self._name = name
        self._lock = threading.Lock()
        self._proven = threading.Condition(self._lock)  # notified when a peer leaves _unproven
        self._unproven: dict[socket.socket, float] = {}  # start of each handshake, oldest first; guarded by _lock
        self._rejected: set[socket.socket] = set()  # guarded by _lock
        self._connections: dict[socket.socket, threading.Thread] = {}  # guarded by _lock
        self._closing = threading.Event()  # set while _lock is held
        self._short_of_files = False  # used by the acceptor alone
        self._last_encoded: tuple[Message, bytes] | None = None  # shared by all threads: it is replaced atomically
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_QUEUE)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Stop serving, end all connections and join the threads. Calling it again does nothing."""
        with self._lock:
            self._closing.set()
            self._proven.notify_all()
            open_connections = dict(self._connections)
        shut_down(self._listener)
        for connection in open_connections:
            stop_receiving(connection)  # responses in progress are still sent
        self._acceptor.join()
        self._listener.close()
        deadline = Deadline.after(_LAST_ANSWER_SECONDS)
        for connection, thread in open_connections.items():
            thread.join(deadline.remaining())
            shut_down(connection)
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                if error.errno == errno.EMFILE and allow_more_files():
                    continue
                if error.errno in {errno.EMFILE, errno.ENFILE}:
                    self._warn_out_of_files()
                    self._closing.wait(_SHORT_OF_FILES_SECONDS)
                continue  # otherwise the client disconnected before it was accepted
            thread = threading.Thread(target=self._serve, args=(connection,), name=f"{self._name}-peer", daemon=True)
            with self._lock:
                self._make_room()
                if self._closing.is_set():
                    connection.close()
                    return
                self._unproven[connection] = time.monotonic()
                self._connections[connection] = thread
                thread.start()

    def _make_room(self) -> None:
        while len(self._unproven) >= _MAX_UNPROVEN and not self._closing.is_set():
            oldest, since = next(iter(self._unproven.items()))
            seconds = since + _UNDISTURBED_SECONDS - time.monotonic()
            if seconds <= 0 and oldest not in self._rejected:
                self._rejected.add(oldest)
                stop_receiving(oldest)  # its thread ends the handshake
            self._proven.wait(max(seconds, _UNDISTURBED_SECONDS))

    def _warn_out_of_files(self) -> None:
        if not self._short_of_files:
            self._short_of_files = True
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger.warning(
                "%s cannot accept more connections: this process has reached its limit of %d open files (ulimit -n; "
                "hard limit %d). Each rank needs two connections. Raise the limit; ranks that cannot connect "
                "leave their output in the executors' logs.",
                self._name,
                soft,
                hard,
            )

    def _serve(self, connection: socket.socket) -> None:
        try:
            frames = self._authenticated(connection)
            enable_keepalive(connection)
            self._serve_member(frames)
        except MessageError as error:
            logger.warning(
                "%s closed the connection to a peer that knows the job's secret but sent an invalid message: %s "
                "Install the same version of sparkhvd on the driver and all executors.",
                self._name,
                error,
            )
        except (OSError, SparkHvdError) as error:
            logger.debug("A connection ended: %s", error)
        finally:
            with self._lock:
                del self._connections[connection]
            connection.close()

    def _authenticated(self, connection: socket.socket) -> FrameSocket:
        deadline = Deadline.after(_HANDSHAKE_SECONDS)

        def admit() -> None:
            with self._lock:  # after this, the connection cannot be rejected
                if connection in self._rejected:
                    raise ConnectionResetError("The server ended this handshake to make room for another one.")
                del self._unproven[connection]
                self._proven.notify_all()

        try:
            return accept_handshake(connection, self._secret, deadline, encrypt=self._encrypt, admit=admit)
        except (OSError, SparkHvdError):
            # A slow but legitimate peer retries.
            if connection in self._rejected or deadline.expired():
                reply_busy(connection)
            raise
        finally:
            with self._lock:
                self._unproven.pop(connection, None)
                self._rejected.discard(connection)
                self._proven.notify_all()

    def _send_late(self, frames: FrameSocket, reply: Message) -> None:
        """Send a response from the thread of its future, at a time when the connection's own thread does not send."""
        try:
            frames.send(self._encoded(reply), Deadline.after(_REPLY_SECONDS))
        except (OSError, ValueError) as error:
            logger.debug("%s could not answer: %s", self._name, error)
            frames.wake()  # the peer must not wait for a response that never comes

    def _encoded(self, reply: Message) -> bytes:
        """Return the bytes of a reply, cached because the same reply often goes to many peers in a row."""
        last = self._last_encoded
        if last is None or last[0] is not reply:
            self._last_encoded = last = (reply, encode(reply))
        return last[1]

    def _serve_member(self, frames: FrameSocket) -> None:
        attending: TaskStatus | None = None
        late: Future[Message] | None = None
        try:
            # A rank may be silent for hours, but its task may not. close() interrupts this wait.
            while (payload := frames.receive(idle=_idle(attending, late))) is not None:
                message = decode(payload)
                if isinstance(message, TaskStatus) and self._on_lost is not None:
                    attending = message
                    frames.set_ack_timeout(UNANSWERED_SECONDS)
                reply = self._handler.handle(message)
                if isinstance(reply, Future):
                    late = reply
                    reply.add_done_callback(lambda done: self._send_late(frames, done.result()))
                elif reply is not None:
                    frames.send(encode(reply), Deadline.after(_REPLY_SECONDS))
        except OSError as error:
            lost = is_host_unreachable(error) or isinstance(error, DeadlineExceededError)
            if attending is not None and self._on_lost is not None and lost:
                self._on_lost(attending, error)
            raise


def _idle(attending: TaskStatus | None, late: Future[Message] | None) -> Deadline:
    """Return the deadline of the next message; a peer that awaits a response sends nothing meanwhile."""
    awaits_answer = late is not None and not late.done()
    return Deadline(math.inf) if attending is None or awaits_answer else Deadline.after(SILENT_SECONDS)
