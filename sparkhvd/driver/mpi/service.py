"""Where the tasks register, and where agents ask which task executes commands for a host."""

from __future__ import annotations

import string
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkhvd.deadline import Deadline
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.spark.task_exchange import stage_attempt
from sparkhvd.errors import DeadlineExceededError
from sparkhvd.rpc.messages import Acknowledged, FindTask, Message, Register, Rejected, TaskAddress, TaskStatus
from sparkhvd.rpc.registration import TaskOffer, TaskRegistration, TaskServer
from sparkhvd.task.assignment import assign


@dataclass(frozen=True)
class MpiHost:
    """A host as ``mpirun`` sees it.

    Attributes:
        name: its name for ``mpirun``; letters only, because Open MPI computes with the digits of a name.
        host_hash: the key that its tasks registered with.
        tasks: the indices of its tasks; the smallest one executes ``orted``.
    """

    name: str
    host_hash: str
    tasks: tuple[int, ...]


def mpi_hosts(offers: Sequence[TaskOffer]) -> list[MpiHost]:
    """The hosts of a job in the order of the ranks that ``mpirun`` gives them."""
    tasks: dict[str, list[int]] = {}
    for slot in assign(offers):
        tasks.setdefault(slot.offer.host_hash, []).append(slot.offer.task_index)
    return [MpiHost(_name(number), key, tuple(found)) for number, (key, found) in enumerate(tasks.items())]


def _name(number: int) -> str:
    letters = ""
    while number >= 0:
        letters = string.ascii_lowercase[number % 26] + letters
        number = number // 26 - 1
    return f"sparkhvd-{letters}"


class DriverService:
    """A handler for ``sparkhvd.rpc.server.Server``; what it does not know is output.

    Args:
        num_tasks: how many tasks there will be.
        stream: takes the output.
    """

    def __init__(self, num_tasks: int, stream: LogStream) -> None:
        self._num_tasks = num_tasks
        self._stream = stream
        self._changed = threading.Condition()  # guards all below
        self._newest = -1  # attempt of the stage that a task has come from
        self._registered: dict[int, TaskRegistration] = {}  # those of its tasks that have come so far, by index
        self._tasks: dict[int, TaskStatus] = {}  # the last that was said of their ranks, by index
        self._servers: Mapping[str, TaskServer] = {}
        self._over = ""

    def handle(self, message: Message) -> Message | None:
        if isinstance(message, TaskStatus):
            self._note(message)
            return None
        if isinstance(message, Register):
            return self._register(message.registration)
        if isinstance(message, FindTask):
            return self._find(message)
        return self._stream.handle(message)

    def await_registrations(self, above: int, deadline: Deadline) -> tuple[int, list[TaskRegistration]]:
        """The attempt whose tasks have all registered, and their registrations by index.

        Args:
            above: only attempts with a higher number count.
            deadline: when to give up.

        Raises:
            DeadlineExceededError: not all of them came.
        """
        with self._changed:
            while self._newest <= above or self._missing():
                if self._over:
                    raise DeadlineExceededError(self._over)
                if not self._changed.wait(deadline.remaining()) and deadline.expired():
                    there = f"{len(self._registered)} of {self._num_tasks}"
                    raise DeadlineExceededError(f"Timed out waiting for Spark tasks to register: {there} did.")
            return self._newest, [self._registered[index] for index in range(self._num_tasks)]

    def missing(self) -> list[int]:
        """The tasks that have not come."""
        with self._changed:
            return self._missing()

    def tasks(self) -> dict[int, TaskStatus]:
        """How far the ranks are, by the index of their task; only of those that have begun."""
        with self._changed:
            return dict(self._tasks)

    def serve_hosts(self, servers: Mapping[str, TaskServer]) -> None:
        """From now on agents learn which task's server executes commands for a host, by ``MpiHost.name``."""
        with self._changed:
            self._servers = dict(servers)

    def end(self, why: str) -> None:
        """The job is over: nobody may register any more, and nobody is waited for."""
        with self._changed:
            self._over = why
            self._changed.notify_all()

    def _note(self, task: TaskStatus) -> None:
        with self._changed:
            self._tasks[task.task_index] = task

    def _missing(self) -> list[int]:
        return [index for index in range(self._num_tasks) if index not in self._registered]

    def _register(self, registration: TaskRegistration) -> Message:
        index = registration.offer.task_index
        if index not in range(self._num_tasks):
            return Rejected(f"This job has {self._num_tasks} tasks; there is no task {index}.")
        number = stage_attempt(registration.attempt, index)
        with self._changed:
            if self._over:
                return Rejected(self._over)
            if number > self._newest:
                self._newest, self._registered = number, {}
            if number == self._newest:  # else Spark ends it
                self._registered[index] = registration
                self._changed.notify_all()
        return Acknowledged()

    def _find(self, message: FindTask) -> Message:
        with self._changed:
            server = self._servers.get(message.host)
        if server is None:
            return Rejected(f"No task of this job runs on host {message.host}.")
        return TaskAddress(server)
