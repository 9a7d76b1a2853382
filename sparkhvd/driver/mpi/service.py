"""The service where tasks register, and where agents look up the task that executes commands for a host."""

from __future__ import annotations

import string
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkhvd._util.counts import counted
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
        name: its name for ``mpirun``, without digits, because Open MPI interprets the digits of a name.
        host_hash: the key that its tasks registered with.
        tasks: the indices of its tasks; the task with the smallest index executes ``orted``.
    """

    name: str
    host_hash: str
    tasks: tuple[int, ...]


def mpi_hosts(offers: Sequence[TaskOffer]) -> list[MpiHost]:
    """Return the hosts of a job in the order of the ranks that ``mpirun`` assigns."""
    tasks: dict[str, list[int]] = {}
    for slot in assign(offers):
        tasks.setdefault(slot.offer.host_hash, []).append(slot.offer.task_index)
    return [MpiHost(_host_name(number), key, tuple(indices)) for number, (key, indices) in enumerate(tasks.items())]


def _host_name(number: int) -> str:
    letters = ""
    while number >= 0:
        letters = string.ascii_lowercase[number % 26] + letters
        number = number // 26 - 1
    return f"sparkhvd-{letters}"


class DriverService:
    """A handler for ``sparkhvd.rpc.server.Server``; it passes all other messages, such as output, to ``stream``.

    Args:
        num_tasks: number of tasks.
        stream: takes the output.
    """

    def __init__(self, num_tasks: int, stream: LogStream) -> None:
        self._num_tasks = num_tasks
        self._stream = stream
        self._changed = threading.Condition()  # guards the fields below
        self._newest = -1  # the newest attempt of the stage with a registered task
        self._registered: dict[int, TaskRegistration] = {}  # the registered tasks of that attempt, by index
        self._tasks: dict[int, TaskStatus] = {}  # the last status of each task, by index
        self._servers: Mapping[str, TaskServer] = {}
        self._end_reason = ""  # empty while the job runs

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
        """Wait for an attempt with registrations of all its tasks; return its number and the registrations by index.

        Args:
            above: the wait is for an attempt with a higher number.
            deadline: when to stop waiting.

        Raises:
            DeadlineExceededError: not all tasks registered.
        """
        with self._changed:
            while self._newest <= above or self._missing():
                if self._end_reason:
                    raise DeadlineExceededError(self._end_reason)
                if not self._changed.wait(deadline.remaining()) and deadline.expired():
                    registered = f"{len(self._registered)} of {self._num_tasks} registered"
                    raise DeadlineExceededError(f"Timed out waiting for Spark tasks to register: {registered}.")
            return self._newest, [self._registered[index] for index in range(self._num_tasks)]

    def missing(self) -> list[int]:
        """Return the indices of the tasks that have not registered."""
        with self._changed:
            return self._missing()

    def tasks(self) -> dict[int, TaskStatus]:
        """Return the last status of each task that has reported one, by index."""
        with self._changed:
            return dict(self._tasks)

    def serve_hosts(self, servers: Mapping[str, TaskServer]) -> None:
        """Set the task servers that execute commands for the hosts, by ``MpiHost.name``, for agents to find."""
        with self._changed:
            self._servers = dict(servers)

    def end(self, why: str) -> None:
        """End the service: reject further registrations, and stop waiting for them."""
        with self._changed:
            self._end_reason = why
            self._changed.notify_all()

    def _note(self, task: TaskStatus) -> None:
        with self._changed:
            self._tasks[task.task_index] = task

    def _missing(self) -> list[int]:
        return [index for index in range(self._num_tasks) if index not in self._registered]

    def _register(self, registration: TaskRegistration) -> Message:
        index = registration.offer.task_index
        if index not in range(self._num_tasks):
            return Rejected(f"Task index {index} is out of range: this job has {counted(self._num_tasks, 'task')}.")
        number = stage_attempt(registration.attempt, index)
        with self._changed:
            if self._end_reason:
                return Rejected(self._end_reason)
            if number > self._newest:
                self._newest, self._registered = number, {}
            if number == self._newest:  # Spark ends tasks of older attempts
                self._registered[index] = registration
                self._changed.notify_all()
        return Acknowledged()

    def _find(self, message: FindTask) -> Message:
        with self._changed:
            server = self._servers.get(message.host)
        if server is None:
            return Rejected(f"No task of this job runs on host {message.host}.")
        return TaskAddress(server)
