"""A launcher that starts the ranks on several machines through ssh, or through srun in a Slurm job, without Spark."""

from __future__ import annotations

import queue
import secrets
from collections.abc import Collection
from concurrent import futures
from contextlib import ExitStack
from functools import partial
from typing import ClassVar

from sparkhvd._util.background import in_background, is_done_within
from sparkhvd.deadline import Deadline
from sparkhvd.driver.host_process import HostEnded, HostProcess, host_command, host_setup
from sparkhvd.driver.hosts import Host, take_slots
from sparkhvd.driver.launcher import LaunchHandle, LaunchRequest, warn_of_versions
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.results import results_in_order
from sparkhvd.errors import ConfigError, LaunchError, StartTimeoutError
from sparkhvd.rpc.messages import Flush, Output, Started
from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.task.assignment import assign
from sparkhvd.task.host.messages import HostDone, HostJob, HostLost, HostReady
from sparkhvd.task.job import Job
from sparkhvd.task.rank import JobPlan
from sparkhvd.task.supervision import Outcome

# How long a host may take to report the outcome of its ranks after another host's rank has failed.
_FAILED_SECONDS = 3.0


class SshLauncher:
    """Starts jobs on the hosts of the request."""

    on_spark: ClassVar[bool] = False
    takes_rows: ClassVar[bool] = False

    def __init__(self, request: LaunchRequest) -> None:
        if not request.hosts:
            raise ConfigError("launcher='ssh' needs hosts, for example hosts='host1:2,host2:2'.")
        self._request = request
        self._hosts = take_slots(request.hosts, request.num_proc)

    def reserve(self, deadline: Deadline) -> int:  # noqa: ARG002 - nothing to wait for
        return sum(host.slots for host in self._hosts)

    def launch(self, job: Job, stream: LogStream) -> LaunchHandle:
        return SshHandle(job, stream, self._hosts, self._request)


class SshHandle:
    """The host processes of one job, and the thread that communicates with them."""

    def __init__(self, job: Job, stream: LogStream, hosts: tuple[Host, ...], request: LaunchRequest) -> None:
        self._job = job
        self._hosts = hosts
        self._stream = stream
        self._deadline = Deadline.after(job.start_timeout)
        self._access = request.access
        self._token = secrets.token_bytes(32)
        self._ranks: dict[int, int] = {}  # by task index, once they are assigned
        self._inbox: queue.SimpleQueue[tuple[int, object]] = queue.SimpleQueue()
        with ExitStack() as stack:
            self._processes = []
            for number, host in enumerate(hosts):
                command = host_command(host.name, job.executable, request.access)
                process = HostProcess(command, partial(self._receive, number))
                stack.callback(process.close)
                self._processes.append(process)
            self._stack = stack.pop_all()
        self._contents = in_background(self._run, "sparkhvd-job")

    def wait_started(self, deadline: Deadline) -> None:
        """Return at once: the thread that communicates with the hosts ends the job if they do not start."""

    def results(self) -> list[bytes]:
        is_done_within(self._contents)
        return results_in_order(self._contents.result(), self._job.num_proc)

    def close(self) -> None:
        for process in self._processes:  # in parallel, because each may take a while
            process.hang_up()
        self._stack.close()
        futures.wait([self._contents])

    def _run(self) -> dict[int, bytes | Outcome]:
        for process, part in zip(self._processes, self._parts(), strict=True):
            process.send(part)
        plan = self._plan(self._await_ready())
        self._ranks = {slot.offer.task_index: slot.world.rank for slot in plan.slots}
        self._stream.started.set()
        for process in self._processes:
            process.send(plan)
        contents: dict[int, bytes | Outcome] = {}
        waiting = set(range(len(self._hosts)))
        deadline: Deadline | None = None
        while waiting:
            try:
                number, message = self._next(deadline, waiting)
            except queue.Empty:  # the job has failed, and a host does not report the outcome of its ranks
                break
            if isinstance(message, HostDone):
                contents |= message.contents
                waiting.discard(number)
                if any(isinstance(content, Outcome) and content.failure for content in message.contents.values()):
                    deadline = deadline or Deadline.after(_FAILED_SECONDS)
        return contents

    def _parts(self) -> list[HostJob]:
        setup = host_setup()
        names = tuple(host.name for host in self._hosts)
        parts, first_index = [], 0
        for host in self._hosts:
            parts.append(
                HostJob(setup, self._job, host.name, names, first_index, host.slots, first_index == 0, self._token)
            )
            first_index += host.slots
        return parts

    def _await_ready(self) -> list[HostReady]:
        ready: dict[int, HostReady] = {}
        while len(ready) < len(self._hosts):
            try:
                number, message = self._next(self._deadline, range(len(self._hosts)))
            except queue.Empty:
                late = ", ".join(host.name for number, host in enumerate(self._hosts) if number not in ready)
                raise StartTimeoutError(
                    f"Not all hosts were ready within start_timeout={self._job.start_timeout:g} s: {late} did not "
                    f"report. Check that `{self._access.check}` succeeds and that imports do not hang there, or raise "
                    "start_timeout."
                ) from None
            if isinstance(message, HostReady):
                ready[number] = message
        return [ready[number] for number in range(len(self._hosts))]

    def _plan(self, ready: list[HostReady]) -> JobPlan:
        offers: list[TaskOffer] = [offer for host in ready for offer in host.offers]
        warn_of_versions(self._job, offers)
        rendezvous = (ready[0].offers[0].bind_host, ready[0].rendezvous_port)
        return JobPlan(tuple(assign(offers)), (rendezvous,), self._token, self._job.config.encrypt)

    def _receive(self, number: int, message: object) -> None:
        # The thread that reads from the host writes its output, so that a slow writer holds up the ranks. A queue would
        # grow without limit.
        if isinstance(message, Output | Started | Flush):
            self._stream.handle(message)
        else:
            self._inbox.put((number, message))

    def _progress(self, number: int) -> str:
        """Return the progress of the job on a host, as a clause for an error message."""
        if not self._ranks:
            return ""
        first = sum(host.slots for host in self._hosts[:number])
        ranks = sorted(self._ranks[first + index] for index in range(self._hosts[number].slots))
        names = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        return f" while {names} started or ran there"

    def _next(self, deadline: Deadline | None, needed: Collection[int]) -> tuple[int, object]:
        """Return the next message of a host; ignore the end of a host that is no longer needed.

        Raises:
            LaunchError: a host was lost.
            queue.Empty: no message came by the deadline.
        """
        while True:
            seconds = None if deadline is None else max(deadline.remaining(), 0.001)
            number, message = self._inbox.get(timeout=seconds)
            if isinstance(message, HostEnded | HostLost):
                if number not in needed:
                    continue
                raise LaunchError(f"Host {self._hosts[number].name} was lost{self._progress(number)}: {message.why}")
            return number, message
