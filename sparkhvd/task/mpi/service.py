"""The service with which a task of the mpi launcher answers the driver, the agents and other tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError
from sparkhvd.rpc.client import connect
from sparkhvd.rpc.messages import (
    Acknowledged,
    Assign,
    AwaitTaskEnd,
    Executed,
    ExecuteOrted,
    Message,
    ProbeServers,
    Reachable,
    Rejected,
    TaskRunning,
)
from sparkhvd.rpc.registration import TaskOffer, TaskServer
from sparkhvd.task.mpi.orted import Orted

_PROBE_SECONDS = 3.0
# How long a request to execute orted waits for ``allow_start``.
_PREPARE_SECONDS = 30.0
_NOT_FOUND = 127
# How often a task answers AwaitTaskEnd while it runs, as a heartbeat for the driver.
_BEAT_SECONDS = 3.0


class TaskService:
    """The handler of a task's ``sparkhvd.rpc.server.Server``.

    Args:
        secret: the job's secret, which other tasks' servers require.
        encrypt: whether connections to other tasks must be encrypted.
    """

    def __init__(self, secret: bytes, *, encrypt: bool = False) -> None:
        self._secret = secret
        self._encrypt = encrypt
        self._assigned = threading.Event()
        self._task_ended = threading.Event()
        self._can_execute = threading.Event()
        self._orted_ended = threading.Event()
        self._lock = threading.Lock()
        self._plan: tuple[TaskOffer, ...] = ()  # written before _assigned is set
        self._environment: Mapping[str, str] = {}  # written before _can_execute is set
        self._orted: Orted | None = None  # guarded by _lock
        self._closed = False  # guarded by _lock
        self._ended: tuple[int, str] | None = None  # guarded by _lock

    def handle(self, message: Message) -> Message | None:
        handlers: dict[type[Message], Callable[..., Message]] = {
            ProbeServers: self._probe,
            Assign: self._assign,
            AwaitTaskEnd: self._await_task_end,
            ExecuteOrted: self._execute,
        }
        handler = handlers.get(type(message))
        return (
            Rejected(f"A task does not handle {type(message).__name__} messages.")
            if handler is None
            else handler(message)
        )

    def plan_within(self, seconds: float) -> tuple[TaskOffer, ...] | None:
        """Wait at most ``seconds`` for the driver's assignment, and return it; None if it does not arrive in time."""
        return self._plan if self._assigned.wait(seconds) else None

    def allow_start(self, environment: Mapping[str, str]) -> None:
        """Allow requests to start ``orted``, in this environment."""
        self._environment = environment
        self._can_execute.set()

    def orted_ended(self) -> tuple[int, str] | None:
        """Return the exit code and the last output of ``orted``; None while it has not ended."""
        with self._lock:
            return self._ended

    def await_orted_end(self, seconds: float) -> None:
        """Wait at most ``seconds`` for ``orted`` to end."""
        self._orted_ended.wait(seconds)

    def close(self) -> None:
        """End ``orted``, and report the end of this task to the driver."""
        with self._lock:
            orted = self._orted
            self._closed = True
        if orted is not None:
            orted.close()
        self._task_ended.set()
        self._can_execute.set()

    def _probe(self, message: ProbeServers) -> Message:
        if not message.servers:
            return Reachable(())
        with ThreadPoolExecutor(len(message.servers), thread_name_prefix="sparkhvd-probe") as pool:
            tried = zip(message.servers, pool.map(self._can_reach, message.servers), strict=True)
            return Reachable(tuple(server.address for server, is_reachable in tried if is_reachable))

    def _can_reach(self, server: TaskServer) -> bool:
        try:
            deadline = Deadline.after(_PROBE_SECONDS)
            connection = connect([(server.address, server.port)], self._secret, deadline, encrypt=self._encrypt)
        except OSError:
            return False
        with closing(connection):
            return True

    def _assign(self, message: Assign) -> Message:
        self._plan = message.offers
        self._assigned.set()
        return Acknowledged()

    def _await_task_end(self, message: AwaitTaskEnd) -> Message:  # noqa: ARG002 - it has no fields
        return Acknowledged() if self._task_ended.wait(_BEAT_SECONDS) else TaskRunning()

    def _execute(self, message: ExecuteOrted) -> Message:
        allowed = self._can_execute.wait(_PREPARE_SECONDS)
        with self._lock:
            if not allowed or self._closed:
                return Rejected("This task does not start orted: another task of its host does, or the job has ended.")
            if self._orted is not None:
                return Rejected("orted was already started on this host.")
            try:
                self._orted = Orted(message.arguments, self._environment)
            except LaunchError as error:
                return self._note_end(_NOT_FOUND, str(error))
            orted = self._orted
        code, output = orted.wait()
        with self._lock:
            return self._note_end(code, output)

    def _note_end(self, code: int, output: str) -> Executed:
        """Note the end of ``orted``, with the lock held; return the answer to the request."""
        self._ended = (code, output)
        self._orted_ended.set()
        return Executed(code, output.encode()[-60_000:])
