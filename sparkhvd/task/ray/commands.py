"""The commands of a ``RayExecutor``: functions that a rank runs one after the other, in one process.

The rank's actor forwards the commands over a Unix socket. Both sides derive the name and the secret of the socket from
the secret that the ranks share.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import cloudpickle

from sparkhvd._util.class_pickling import dumps
from sparkhvd.comm import session
from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError
from sparkhvd.rpc.frames import MAX_FRAME_BYTES, FrameSocket, accept, connect_unix
from sparkhvd.task.supervision import JOB_SECONDS, NOTE_SECONDS

# The first byte of a command; the pickled function and its arguments follow. LEAVE ends the rank.
RUN, EXECUTE, LEAVE = b"r", b"e", b"l"
_POLL_SECONDS = 0.2


class PickledResult:
    """The result of a command; only the caller unpickles it, because the actor may lack the necessary modules."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __reduce__(self) -> tuple[Callable[[bytes], object], tuple[bytes]]:
        return cloudpickle.loads, (self._content,)


class CommandChannel:
    """The actor's side of the socket; one thread calls ``execute``, and any thread may call ``close``."""

    def __init__(self, token: bytes, rank: int) -> None:
        self._secret = _secret(token, rank)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._link: FrameSocket | None = None  # guarded by _lock
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{_socket_name(token, rank)}")
        self._listener.listen(1)
        self._listener.settimeout(_POLL_SECONDS)

    def execute(self, command: bytes, start: Deadline) -> PickledResult | None:
        """Let the rank run a command, and return the result; None for ``LEAVE``.

        Args:
            command: ``RUN`` or ``EXECUTE`` and a pickled call, or ``LEAVE``.
            start: the time by which the rank must be ready for its first command.

        Raises:
            OSError: the rank has ended, was not ready in time, or ``close`` was called.
        """
        link = self._link or self._accept(start)
        link.send(command, Deadline.after(JOB_SECONDS))
        return PickledResult(link.receive(Deadline.after(JOB_SECONDS))) if command != LEAVE else None

    def _accept(self, start: Deadline) -> FrameSocket:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if start.expired():
                    break
                continue
            with connection:
                link = accept(connection, self._secret, Deadline.after(NOTE_SECONDS))
            with self._lock:
                self._link = link
            return link
        raise ConnectionError("The rank has not connected to its actor.")

    def close(self) -> None:
        """Interrupt ``execute`` and close the socket."""
        self._closed.set()
        with self._lock:
            if self._link is not None:
                self._link.close()
        self._listener.close()


def run_commands(
    executable: Callable[..., object] | None, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Run commands until ``LEAVE``; the function of a rank that belongs to a ``RayExecutor``.

    Args:
        executable: the class of the object that ``RayExecutor.execute`` passes to functions; None passes None.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    context = session.launch_context()
    token, rank = context.token, context.world.rank
    deadline = Deadline.after(context.config.start_timeout)
    with closing(connect_unix(_socket_name(token, rank), _secret(token, rank), deadline)) as link:
        instance = None if executable is None else executable(*args, **kwargs)
        while (command := link.receive(Deadline.after(JOB_SECONDS))) != LEAVE:
            fn, fn_args, fn_kwargs = cloudpickle.loads(memoryview(command)[1:])
            first = (instance,) if command[:1] == EXECUTE else ()
            link.send(_pickle_result(fn(*first, *fn_args, **fn_kwargs)), Deadline.after(JOB_SECONDS))


def _pickle_result(result: object) -> bytes:
    try:
        content = dumps(result)
    except Exception as error:
        raise TypeError(f"fn returned a {type(result).__name__} that cannot be pickled: {error}") from error
    if len(content) > MAX_FRAME_BYTES:
        raise LaunchError(
            f"fn returned {len(content):,} bytes, more than the limit of {MAX_FRAME_BYTES:,}. Write large results to a "
            "Store and return their path."
        )
    return content


def _socket_name(token: bytes, rank: int) -> str:
    return f"sparkhvd-{hmac.digest(token, f'socket of rank {rank}'.encode(), hashlib.sha256).hex()[:24]}"


def _secret(token: bytes, rank: int) -> bytes:
    return hmac.digest(token, f"commands of rank {rank}".encode(), hashlib.sha256)
