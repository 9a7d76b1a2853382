"""The requests of the driver and the agents that a task of the mpi launcher handles."""

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
# How long a request to execute orted waits until this task has prepared for it.
_PREPARE_SECONDS = 30.0
_NOT_FOUND = 127
# The interval of heartbeats for the driver.
_BEAT_SECONDS = 3.0


class TaskService:
    """A handler for ``sparkhvd.rpc.server.Server``; one per task.

    Args:
        secret: the job's secret, to authenticate to other tasks' servers.
    """

    def __init__(self, secret: bytes, *, encrypt: bool = False) -> None:
        self._secret = secret
        self._encrypt = encrypt  # whether other tasks must encrypt
        self._assigned = threading.Event()
        self._over = threading.Event()
        self._can_execute = threading.Event()
        self._orted_ended = threading.Event()
        self._lock = threading.Lock()
        self._plan: tuple[TaskOffer, ...] = ()  # written before _assigned is set
        self._environment: Mapping[str, str] = {}  # written before _can_execute is set
        self._orted: Orted | None = None  # guarded by _lock
        self._ended: tuple[int, str] | None = None  # guarded by _lock

    def handle(self, message: Message) -> Message | None:
        answers: dict[type[Message], Callable[..., Message]] = {
            ProbeServers: self._probe,
            Assign: self._assign,
            AwaitTaskEnd: self._attend,
            ExecuteOrted: self._execute,
        }
        answer = answers.get(type(message))
        return (
            Rejected(f"A task does not handle {type(message).__name__} messages.")
            if answer is None
            else answer(message)
        )

    def plan_within(self, seconds: float) -> tuple[TaskOffer, ...] | None:
        """Wait at most ``seconds`` for the assignment of the driver and return it; None if it has not arrived."""
        return self._plan if self._assigned.wait(seconds) else None

    def allow_start(self, environment: Mapping[str, str]) -> None:
        """Allow the start of ``orted``, with this environment."""
        self._environment = environment
        self._can_execute.set()

    def orted_ended(self) -> tuple[int, str] | None:
        """Return the exit code of ``orted`` and its last output; None before its end."""
        with self._lock:
            return self._ended

    def await_orted_end(self, seconds: float) -> None:
        self._orted_ended.wait(seconds)

    def close(self) -> None:
        """End ``orted`` and report to the driver that this task has ended."""
        with self._lock:
            orted = self._orted
        if orted is not None:
            orted.close()
        self._over.set()
        self._can_execute.set()

    def _probe(self, message: ProbeServers) -> Message:
        if not message.servers:
            return Reachable(())
        with ThreadPoolExecutor(len(message.servers), thread_name_prefix="sparkhvd-probe") as pool:
            answers = zip(message.servers, pool.map(self._reaches, message.servers), strict=True)
            return Reachable(tuple(server.address for server, reached in answers if reached))

    def _reaches(self, server: TaskServer) -> bool:
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

    def _attend(self, message: AwaitTaskEnd) -> Message:  # noqa: ARG002 - it has no fields
        return Acknowledged() if self._over.wait(_BEAT_SECONDS) else TaskRunning()

    def _execute(self, message: ExecuteOrted) -> Message:
        if not self._can_execute.wait(_PREPARE_SECONDS) or self._over.is_set():
            return Rejected("Another task starts orted on this host, or the job is over.")
        with self._lock:
            if self._orted is not None:
                return Rejected("orted was already started on this host.")
            try:
                self._orted = Orted(message.arguments, self._environment)
            except LaunchError as error:
                self._ended = (_NOT_FOUND, str(error))
                return Executed(_NOT_FOUND, str(error).encode())
            orted = self._orted
        code, output = orted.wait()
        with self._lock:
            self._ended = (code, output)
        self._orted_ended.set()
        return Executed(code, output.encode()[-60_000:])
