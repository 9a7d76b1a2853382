"""A server of authenticated connections: one thread that accepts, one per connection."""

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

# Strangers can hold no more than this many threads, for no longer than the handshake may take. The oldest makes room
# for another one when it had its undisturbed time; others wait in the kernel's queue.
_MAX_UNPROVEN = 32
_HANDSHAKE_SECONDS = 5.0
_UNDISTURBED_SECONDS = 0.25
_QUEUE = 4096  # the kernel cuts it down to net.core.somaxconn
_REPLY_SECONDS = 30.0
_LAST_ANSWER_SECONDS = 2.0
_SHORT_OF_FILES_SECONDS = 0.1
# Without a sign of life from a task. An overloaded host, or one that is being moved, may be late.
SILENT_SECONDS = 60.0
# For the kernel of a task's host to acknowledge what was sent to the task.
UNANSWERED_SECONDS = 9.0


class Handler(Protocol):
    """What a server does with messages; called from the threads of several connections at once."""

    def handle(self, message: Message) -> Message | Future[Message] | None:
        """Deal with ``message``; what is returned goes back to the sender, a future's result when it is there."""


class Server(Closable):
    """Serves from construction until ``close()``; speaks only to holders of ``secret``.

    Args:
        secret: the shared secret.
        handler: gets every message.
        host: the local address to bind; no other interface listens.
        port: 0 takes a free one.
        name: prefix of the threads' names.
        encrypt: whether all that travels is encrypted; the clients follow. See ``require_encryption``.
        on_lost: called with the last ``TaskStatus`` of a connection that broke because the other host does not answer
            any more, or over which a task that waits for no answer said nothing for ``SILENT_SECONDS``; and with the
            error.
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
        self._proven = threading.Condition(self._lock)  # somebody has left _unproven
        self._unproven: dict[socket.socket, float] = {}  # since when; oldest first; guarded by _lock
        self._turned_away: set[socket.socket] = set()  # guarded by _lock
        self._connections: dict[socket.socket, threading.Thread] = {}  # guarded by _lock
        self._closing = threading.Event()  # set while _lock is held
        self._short_of_files = False  # of the acceptor
        self._last_encoded: tuple[Message, bytes] | None = None  # of any thread: it is replaced as a whole
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_QUEUE)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Stop serving, end all connections and join the threads. May be called again."""
        with self._lock:
            self._closing.set()
            self._proven.notify_all()
            open_connections = dict(self._connections)
        shut_down(self._listener)
        for connection in open_connections:
            stop_receiving(connection)  # what is being answered right now is answered
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
                    self._say_that_files_are_short()
                    self._closing.wait(_SHORT_OF_FILES_SECONDS)
                continue  # else the client went away before it was accepted
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
            if seconds <= 0 and oldest not in self._turned_away:
                self._turned_away.add(oldest)
                stop_receiving(oldest)  # its thread ends the handshake
            self._proven.wait(max(seconds, _UNDISTURBED_SECONDS))

    def _say_that_files_are_short(self) -> None:
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
            self._converse(frames)
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
            with self._lock:  # from here on nobody turns it away
                if connection in self._turned_away:
                    raise ConnectionResetError("The server ended this handshake to make room for another one.")
                del self._unproven[connection]
                self._proven.notify_all()

        try:
            return accept_handshake(connection, self._secret, deadline, encrypt=self._encrypt, admit=admit)
        except (OSError, SparkHvdError):
            # A member whose host has been slow comes again.
            if connection in self._turned_away or deadline.expired():
                reply_busy(connection)
            raise
        finally:
            with self._lock:
                self._unproven.pop(connection, None)
                self._turned_away.discard(connection)
                self._proven.notify_all()

    def _send_late(self, frames: FrameSocket, reply: Message) -> None:
        """Answer a peer that waits, so that its connection's own thread sends nothing."""
        try:
            frames.send(self._encoded(reply), Deadline.after(_REPLY_SECONDS))
        except (OSError, ValueError) as error:
            logger.debug("%s could not answer: %s", self._name, error)
            frames.wake()  # the peer must not wait for what does not come

    def _encoded(self, reply: Message) -> bytes:
        """The bytes of a reply; the same one often goes to many, one after another."""
        last = self._last_encoded
        if last is None or last[0] is not reply:
            self._last_encoded = last = (reply, encode(reply))
        return last[1]

    def _converse(self, frames: FrameSocket) -> None:
        attending: TaskStatus | None = None
        late: Future[Message] | None = None
        try:
            # A rank may be silent for hours, its task may not; close() ends this wait.
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
    """How long the next message may take; who waits for an answer says nothing."""
    asks = late is not None and not late.done()
    return Deadline(math.inf) if attending is None or asks else Deadline.after(SILENT_SECONDS)
