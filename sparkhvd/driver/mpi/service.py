"""Where the tasks register, and where agents ask which task executes commands for a host."""

from __future__ import annotations

import string
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkhvd.deadline import Deadline
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.meeting import stage_attempt
from sparkhvd.errors import DeadlineExceededError
from sparkhvd.rpc.messages import Acknowledged, Attending, FindTask, Message, Refused, Register, TaskAddress
from sparkhvd.rpc.registration import Registration, TaskOffer, TaskServer
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
        self._attempts: dict[int, dict[int, Registration]] = {}
        self._newest = -1
        self._here: dict[int, str] = {}  # the host of each task of the newest attempt that has come so far
        self._servers: Mapping[str, TaskServer] = {}
        self._over = ""

    def handle(self, message: Message) -> Message | None:
        if isinstance(message, Attending):
            self._note(message)
            return None
        if isinstance(message, Register):
            return self._register(message.registration)
        if isinstance(message, FindTask):
            return self._find(message)
        return self._stream.handle(message)

    def await_registrations(self, above: int, deadline: Deadline) -> tuple[int, list[Registration]]:
        """The attempt whose tasks have all registered, and their registrations by index.

        Args:
            above: only attempts with a higher number count.
            deadline: when to give up.

        Raises:
            DeadlineExceededError: not all of them came.
        """
        with self._changed:
            while (found := self._complete(above)) is None and not self._over:
                if not self._changed.wait(deadline.remaining()) and deadline.expired():
                    there = max((len(one) for one in self._attempts.values()), default=0)
                    raise DeadlineExceededError(
                        f"Timed out waiting for Spark tasks to register: {there} of {self._num_tasks} did."
                    )
            if found is None:
                raise DeadlineExceededError(self._over)
            return found, [self._attempts[found][index] for index in range(self._num_tasks)]

    def missing(self) -> list[int]:
        """The tasks that have not come to the others; all when these do not get any further, either."""
        with self._changed:
            return sorted(set(range(self._num_tasks)) - set(self._here)) or list(range(self._num_tasks))

    def serve_hosts(self, servers: Mapping[str, TaskServer]) -> None:
        """From now on agents learn which task's server executes commands for a host, by ``MpiHost.name``."""
        with self._changed:
            self._servers = dict(servers)

    def end(self, why: str) -> None:
        """The job is over: nobody may register any more, and nobody is waited for."""
        with self._changed:
            self._over = why
            self._changed.notify_all()

    def _complete(self, above: int) -> int | None:
        done = [number for number, one in self._attempts.items() if number > above and len(one) == self._num_tasks]
        return max(done, default=None)

    def _note(self, task: Attending) -> None:
        number = stage_attempt(task.attempt, task.task_index)
        with self._changed:
            if number > self._newest:
                self._newest, self._here = number, {}
            if number == self._newest:
                self._here[task.task_index] = task.host

    def _register(self, registration: Registration) -> Message:
        index = registration.offer.task_index
        if index not in range(self._num_tasks):
            return Refused(f"This job has {self._num_tasks} tasks; there is no task {index}.")
        with self._changed:
            if self._over:
                return Refused(self._over)
            self._attempts.setdefault(registration.attempt, {})[index] = registration
            self._changed.notify_all()
        return Acknowledged()

    def _find(self, message: FindTask) -> Message:
        with self._changed:
            server = self._servers.get(message.host)
        if server is None:
            return Refused(f"No task of this job runs on host {message.host}.")
        return TaskAddress(server)
