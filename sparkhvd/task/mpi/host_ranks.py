"""The ranks that ``orted`` starts on one host, as seen by the host's first task."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from typing import TypeVar

from sparkhvd.comm.connect.inherited_world import memory_file
from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError, SparkHvdError
from sparkhvd.rpc.fields import MessageError
from sparkhvd.rpc.frames import FrameSocket, accept
from sparkhvd.rpc.messages import Message, Preload, RankConnected, WorkerEnded, WorkerForked, decode, encode
from sparkhvd.task.failure_report import describe_exit
from sparkhvd.task.worker.exit import Exited
from sparkhvd.task.worker.process import Spawned

T = TypeVar("T", bound=Message)

_HELLO_SECONDS = 30.0
_POLL_SECONDS = 0.2


class RankEnd:
    """A worker whose parent, the process of a rank, reports the worker's end over a link."""

    def __init__(self, pid: int, link: FrameSocket) -> None:
        self.pid = pid
        self._link = link

    def wait(self) -> Exited:
        try:
            ended = _receive(WorkerEnded, self._link, Deadline.after(400 * 86400.0))
        except (OSError, SparkHvdError):
            return Exited(-9, ended_by_launcher=True)  # orted kills the parent if SIGTERM does not end it
        return Exited(ended.returncode, ended_by_launcher=ended.ended_by_launcher)

    def release(self) -> None:
        self._link.close()


class RankListener:
    """The Unix socket to which the ranks of this host connect. Its name is abstract, so it leaves no file behind."""

    def __init__(self) -> None:
        self.name = f"sparkhvd-{secrets.token_hex(8)}"
        self._secret = secrets.token_bytes(32)
        self._resources = ExitStack()
        self.secret_path = self._resources.enter_context(memory_file(self._secret))  # for the ranks
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(1024)

    def accept(
        self, preload: Sequence[str], deadline: Deadline, should_stop: Callable[[], bool]
    ) -> tuple[RankConnected, Spawned]:
        """Return the message of the next rank that connects, and its worker.

        Args:
            preload: modules that the worker imports first.
            deadline: the end of the wait.
            should_stop: polled during the wait; returns whether to stop waiting.

        Raises:
            LaunchError: no rank connected in time, or ``should_stop`` returned true.
        """
        while True:
            self._socket.settimeout(min(_POLL_SECONDS, max(deadline.remaining(), 0.001)))
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                if should_stop() or deadline.expired():
                    raise LaunchError("no rank connected") from None
                continue
            with connection, suppress(OSError, SparkHvdError, ValueError):
                # An error means that the peer is not a rank of this job, or that it has ended, which orted reports.
                return self._accept_rank(connection, preload)

    def _accept_rank(self, connection: socket.socket, preload: Sequence[str]) -> tuple[RankConnected, Spawned]:
        deadline = Deadline.after(_HELLO_SECONDS)
        with ExitStack() as on_failure:
            link = on_failure.enter_context(closing(accept(connection, self._secret, deadline)))
            connected = _receive(RankConnected, link, deadline)
            link.send(encode(Preload(tuple(preload))), deadline)
            control, worker_end = socket.socketpair()
            on_failure.callback(control.close)
            read_out, write_out = os.pipe()
            on_failure.callback(os.close, read_out)
            read_err, write_err = os.pipe()
            on_failure.callback(os.close, read_err)
            try:
                connection.settimeout(_HELLO_SECONDS)
                socket.send_fds(connection, [b"x"], [worker_end.fileno(), write_out, write_err])
            finally:
                worker_end.close()
                os.close(write_out)
                os.close(write_err)
            pid = _receive(WorkerForked, link, deadline).pid
            on_failure.pop_all()
        return connected, Spawned(RankEnd(pid, link), control, read_out, read_err)

    def close(self) -> None:
        self._socket.close()
        self._resources.close()


def _receive(message_type: type[T], link: FrameSocket, deadline: Deadline) -> T:
    message = decode(link.receive(deadline))
    if not isinstance(message, message_type):
        raise MessageError(f"A rank sent {type(message).__name__} instead of {message_type.__name__}.")
    return message


def orted_failure(returncode: int, output: str) -> str:
    """Return why a host's ranks did not start, to complete "Rank 1 on host X ..."."""
    return f"did not start: orted {describe_exit(returncode)}. Its output: {output.strip() or 'none'}"
