"""Workers of an elastic job on several machines, through ssh, or through srun in a Slurm job.

For the first worker on a host, the driver starts a host process there, as the launcher ``ssh`` does. The host process
starts the host's workers. It stays as long as the host offers slots or runs workers. If it ends, all its workers are
lost, and the next worker that the policy starts there gets a new host process. It also keeps a connection to the
driver, whose kernel notices within seconds that the host does not respond; ssh and srun need longer.
"""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from sparkhvd._util.background import in_background
from sparkhvd.comm.connect.launch_context import MembershipAddress
from sparkhvd.driver.elastic.workers import Event, WorkerStarting
from sparkhvd.driver.host_process import (
    ELASTIC_JOB,
    HostEnded,
    HostProcess,
    SrunOptions,
    SshOptions,
    host_command,
    host_setup,
    is_this_machine,
)
from sparkhvd.driver.launcher import warn_of_versions
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.rpc.messages import Message, NextCommand, Output, SetRank, StartWorker, StopWorker, TaskStatus
from sparkhvd.rpc.server import Server
from sparkhvd.task.elastic.host import END_SECONDS
from sparkhvd.task.elastic.worker import Lost, WorkerLocation, WorkerResult
from sparkhvd.task.failure_report import FailureReport
from sparkhvd.task.host.messages import ElasticHostJob, HostLost, HostReady
from sparkhvd.task.job import Job

logger = logging.getLogger(__name__)

# How much longer a host process may take to end than its workers.
_MARGIN_SECONDS = 5.0


@dataclass
class _Host:
    """A host on which a process of this job runs.

    Attributes:
        name: the user's name for it.
        number: unique within the job, because a lost host may get a new process.
        workers: the workers that the host runs or will start.
        location: where its workers run; None until its process is ready.
    """

    name: str
    number: int
    workers: set[int] = field(default_factory=set)
    location: WorkerLocation | None = None
    process: HostProcess | None = None


class _Listener:
    """Keeps the hosts' connections open: it never answers the request for which they wait."""

    def handle(self, message: Message) -> Future[Message] | None:
        return Future() if isinstance(message, NextCommand) else None


class HostWorkers:
    """Starts workers on listed or discovered hosts.

    Args:
        job: the job of the workers.
        access: how to reach the hosts.
        membership: the address of the membership server, without a worker's number.
        bind_host: the local address at which the hosts reach this driver.
        stream: receives the workers' output.
        inbox: receives the locations and the ends of the workers.
    """

    def __init__(  # noqa: PLR0917
        self,
        job: Job,
        access: SshOptions | SrunOptions,
        membership: MembershipAddress,
        bind_host: str,
        stream: LogStream,
        inbox: queue.SimpleQueue[Event],
    ) -> None:
        self._access = access
        self._membership = membership
        self._stream = stream
        self._inbox = inbox
        self._setup = host_setup()
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards the fields below, up to _ending
        self._hosts: dict[str, _Host] = {}
        self._offered: dict[str, int] = {}
        self._ranks: dict[int, int] = {}  # by worker, for messages
        self._ending: list[Future[None]] = []
        self._server = Server(
            job.secret,
            _Listener(),
            bind_host,
            name="sparkhvd-hosts",
            encrypt=job.config.encrypt,
            host_timeout=job.config.host_timeout,
            on_lost=self._lose_silent_host,
        )
        names = [name for name, _ in membership.addresses]
        self._job = job.with_driver_addresses(tuple((name, self._server.port) for name in names))

    def note_offer(self, capacity: Mapping[str, int]) -> dict[str, str]:
        """End the processes of hosts that neither offer slots nor run workers. Return an empty mapping."""
        with self._lock:
            self._offered = {host: slots for host, slots in capacity.items() if slots > 0}
            for host in list(self._hosts.values()):
                self._end_if_unused(host)
        return {}

    def start(self, worker: int, host: str) -> None:
        """Begin to start a worker; its ``WorkerStarting`` or ``Lost`` follows."""
        with self._lock:
            try:
                entry = self._hosts.get(host) or self._open(host)
            except OSError as error:  # its text names the program, such as ssh
                self._inbox.put(Lost(worker, FailureReport(worker, host, f"did not start: {error}")))
                return
            entry.workers.add(worker)
            if entry.location is not None:
                self._inbox.put(WorkerStarting(worker, entry.location))
            self._send(entry, StartWorker(worker))

    def assign(self, worker: int, rank: int) -> None:
        """Note the rank of a worker in a new generation."""
        with self._lock:
            self._ranks[worker] = rank
            if (entry := self._host_of(worker)) is not None:
                self._send(entry, SetRank(worker, rank))

    def stop(self, worker: int) -> None:
        """Begin to end a worker, without waiting for its end."""
        with self._lock:
            self._ranks.pop(worker, None)
            if (entry := self._host_of(worker)) is not None:
                entry.workers.discard(worker)
                self._send(entry, StopWorker(worker))
                self._end_if_unused(entry)

    def close(self) -> None:
        """End all workers and the processes of the hosts, and wait for their ends."""
        with self._lock:
            for host in list(self._hosts.values()):
                self._end(host)
            ending = list(self._ending)
        try:
            wait(ending)
        finally:  # another Ctrl-C may interrupt the wait
            self._server.close()

    def _open(self, name: str) -> _Host:
        """Start the process of a host."""
        host = _Host(name, next(self._numbers))
        command = host_command(name, self._job.executable, self._access, ELASTIC_JOB)
        host.process = HostProcess(command, functools.partial(self._receive, host), END_SECONDS + _MARGIN_SECONDS)
        uses_ssh = isinstance(self._access, SshOptions) and not is_this_machine(name)
        slots = self._offered.get(name, 1)
        host.process.send(ElasticHostJob(self._setup, self._job, name, host.number, slots, self._membership, uses_ssh))
        self._hosts[name] = host
        return host

    def _receive(self, host: _Host, message: object) -> None:
        """Handle a message of a host; its ``HostProcess`` calls this method from its reading thread."""
        if isinstance(message, Output):
            self._stream.handle(message)
        elif isinstance(message, HostReady):
            self._note_ready(host, message)
        elif isinstance(message, WorkerResult | Lost):
            with self._lock:
                if message.worker in host.workers:
                    host.workers.discard(message.worker)
                    self._ranks.pop(message.worker, None)
                    self._inbox.put(message)
                    self._end_if_unused(host)
        elif isinstance(message, HostLost | HostEnded):
            self._lose(host, message.why)

    def _note_ready(self, host: _Host, ready: HostReady) -> None:
        (offer,) = ready.offers
        warn_of_versions(self._job, [offer])
        with self._lock:
            host.location = WorkerLocation(offer.host_hash, offer.host, offer.bind_host)
            for worker in sorted(host.workers):
                self._inbox.put(WorkerStarting(worker, host.location))

    def _lose_silent_host(self, task: TaskStatus, error: OSError) -> None:
        """Report the workers of a host that does not respond; the server calls this from one of its threads."""
        with self._lock:
            host = self._hosts.get(task.host)
        if host is not None and host.number == task.attempt:
            if host.process is not None:
                host.process.hang_up(is_lost=True)
            self._lose(host, f"it does not respond ({error.strerror or error})")

    def _lose(self, host: _Host, why: str) -> None:
        """Report the workers of a host whose process has ended or cannot be reached."""
        with self._lock:
            outcome = "did not start" if host.location is None else "was lost with its host"
            for worker in sorted(host.workers):
                rank = self._ranks.pop(worker, worker)
                self._inbox.put(Lost(worker, FailureReport(rank, host.name, f"{outcome}: {why}")))
            host.workers.clear()
            if self._hosts.get(host.name) is host:
                self._end(host)

    def _end_if_unused(self, host: _Host) -> None:
        """End the process of a host without workers, unless it is ready and offers slots; the caller holds the lock."""
        if not host.workers and (host.location is None or host.name not in self._offered):
            self._end(host)

    def _end(self, host: _Host) -> None:
        """End a host's process in the background; the caller holds the lock."""
        self._hosts.pop(host.name, None)
        self._ending = [ending for ending in self._ending if not ending.done()]
        if host.process is not None:
            host.process.hang_up()
            self._ending.append(in_background(host.process.close, "sparkhvd-host-end"))

    def _host_of(self, worker: int) -> _Host | None:
        return next((host for host in self._hosts.values() if worker in host.workers), None)

    @staticmethod
    def _send(host: _Host, message: object) -> None:
        if host.process is not None:
            host.process.send(message)
