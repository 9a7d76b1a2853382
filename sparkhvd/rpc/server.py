"""A server of authenticated connections: one core thread serves them all, and a few Python threads call the handler."""

from __future__ import annotations

import logging
import math
import resource
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Protocol

from sparkhvd import _core
from sparkhvd._util.closable import Closable
from sparkhvd._util.processes.forks import close_copies, close_in_children, keep_in_children
from sparkhvd.errors import DeadlineExceededError, SparkHvdError
from sparkhvd.rpc.fields import MessageError
from sparkhvd.rpc.frames import error_of, is_host_unreachable, translated
from sparkhvd.rpc.messages import Message, TaskStatus, decode, encode

logger = logging.getLogger(__name__)

# The largest number of threads that call the handler. A thread starts when all others are busy.
_MAX_THREADS = 16
_WAIT_SECONDS = 60.0
_LAST_ANSWER_SECONDS = 2.0
# The longest silence of a task. An overloaded host, or one that is being migrated, may be late.
SILENT_SECONDS = 60.0
# The time for the kernel of a task's host to acknowledge data sent to the task.
UNANSWERED_SECONDS = _core.SILENT_RENDEZVOUS_SECONDS


class Handler(Protocol):
    """A handler of messages, called from several threads at once, but in order for each connection."""

    def handle(self, message: Message) -> Message | Future[Message] | None:
        """Handle ``message`` and return the reply to its sender, a future of it, or None."""


class Server(Closable):
    """Serves holders of ``secret``, from construction until ``close()``.

    A connection costs no thread. While a message is handled, the next one of its connection is not read, so a slow
    handler makes its senders wait.

    Args:
        secret: the shared secret.
        handler: receives every message.
        host: the local address to bind; the server listens at no other address.
        port: 0 takes a free one.
        name: prefix of the threads' names.
        encrypt: whether connections are encrypted; clients follow. See ``require_encryption``.
        on_lost: called with the last ``TaskStatus`` of a connection and the connection's error, if the peer's host
            became unreachable, or if the task sent nothing for ``SILENT_SECONDS`` while it awaited no response.
        host_timeout: seconds after which a connection ends if its peer's host does not respond; None means
            ``UNANSWERED_SECONDS``.
        on_ended: called with the same arguments whenever a connection that sent a ``TaskStatus`` ends, for any reason.

    Raises:
        OSError: the address cannot be bound.
        ConfigError: this host cannot encrypt.
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
        host_timeout: float | None = None,
        on_ended: Callable[[TaskStatus, Exception], None] | None = None,
    ) -> None:
        self._on_lost = on_lost
        self._on_ended = on_ended
        self._handler = handler
        self._name = name
        self._statuses: dict[int, TaskStatus] = {}  # by connection; one thread at a time handles its messages
        self._pending_replies: dict[int, Future[Message]] = {}  # replies that were not ready at once, by connection
        self._last_encoded: tuple[Message, bytes] | None = None  # shared by all threads: it is replaced atomically
        self._lock = threading.Lock()  # guards the two fields below
        self._threads: list[threading.Thread] = []
        self._idle = 0
        with translated():
            self._core = _core.MessageServer(secret, host, port, encrypt, name, host_timeout or UNANSWERED_SECONDS)
        self.port: int = self._core.port
        self._address = host
        close_in_children(self)
        with self._lock:
            self._add_thread()

    def close(self) -> None:
        """Stop serving, end all connections and join the threads. Calling it again does nothing."""
        self._core.close(_LAST_ANSWER_SECONDS)  # responses in progress are still sent
        keep_in_children(self)
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()

    def leave_to_parent(self) -> None:
        """Close a forked child's copies of the connections."""
        close_copies(self._address, self.port)

    def _add_thread(self) -> None:
        self._idle += 1
        name = f"{self._name}-{len(self._threads)}"
        self._threads.append(threading.Thread(target=self._dispatch, name=name, daemon=True))
        self._threads[-1].start()

    def _dispatch(self) -> None:
        while True:
            try:
                event = self._core.next(_WAIT_SECONDS)
            except _core.CoreError:
                return  # the server is closed
            if event is None:
                continue
            with self._lock:
                self._idle -= 1
                if self._idle == 0 and 0 < len(self._threads) < _MAX_THREADS:
                    self._add_thread()
            try:
                self._handle_event(*event)
            finally:
                with self._lock:
                    self._idle += 1

    def _handle_event(self, connection: int, payload: bytes | None, code: str, why: str, number: int) -> None:
        if connection == 0:
            self._warn_out_of_files()
        elif payload is None:
            self._end_connection(connection, error_of(code, why, number))
        else:
            try:
                self._handle(connection, decode(payload))
            except MessageError as error:
                logger.warning(
                    "%s closed the connection to a peer that knows the job's secret but sent an invalid message: %s "
                    "Install the same version of sparkhvd on the driver and all executors.",
                    self._name,
                    error,
                )
                self._core.drop(connection)
            except (OSError, SparkHvdError) as error:
                logger.debug("%s closed a connection: %s", self._name, error)
                self._core.drop(connection)
            except Exception:
                logger.exception("%s closed a connection, because its message could not be handled.", self._name)
                self._core.drop(connection)

    def _handle(self, connection: int, message: Message) -> None:
        if isinstance(message, TaskStatus):
            self._statuses[connection] = message
        reply = self._handler.handle(message)
        if isinstance(reply, Future):
            self._pending_replies[connection] = reply
            reply.add_done_callback(partial(self._send_late, connection))
        elif reply is not None:
            self._core.send(connection, self._encoded(reply))
        # A rank may be silent for hours, but its task may not. A peer that awaits a response sends nothing meanwhile.
        pending = self._pending_replies.get(connection)
        must_report = self._on_lost is not None and connection in self._statuses and (pending is None or pending.done())
        self._core.resume(connection, SILENT_SECONDS if must_report else math.inf)

    def _send_late(self, connection: int, reply: Future[Message]) -> None:
        try:
            self._core.send(connection, self._encoded(reply.result()))
        except (Exception, CancelledError) as error:  # noqa: BLE001 - the peer must not wait for a response forever
            logger.warning("%s could not answer: %s", self._name, error)
            self._core.drop(connection)

    def _encoded(self, reply: Message) -> bytes:
        """Return the bytes of a reply, cached because the same reply often goes to many peers in a row."""
        last = self._last_encoded
        if last is None or last[0] is not reply:
            self._last_encoded = last = (reply, encode(reply))
        return last[1]

    def _end_connection(self, connection: int, error: OSError | ValueError) -> None:
        # A peer may end at any time, so only a reply that is too large is logged as a warning.
        logger.log(logging.WARNING if isinstance(error, ValueError) else logging.DEBUG, "A connection ended: %s", error)
        self._pending_replies.pop(connection, None)
        status = self._statuses.pop(connection, None)
        lost = is_host_unreachable(error) or isinstance(error, DeadlineExceededError)
        if status is not None and self._on_lost is not None and lost and isinstance(error, OSError):
            self._on_lost(status, error)
        if status is not None and self._on_ended is not None:
            self._on_ended(status, error)

    def _warn_out_of_files(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        logger.warning(
            "%s cannot accept more connections: this process has reached its limit of %d open files (ulimit -n; "
            "hard limit %d). Each rank needs two connections. Raise the limit; ranks that cannot connect "
            "leave their output in the executors' logs.",
            self._name,
            soft,
            hard,
        )
