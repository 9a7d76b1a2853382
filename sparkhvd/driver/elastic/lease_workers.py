"""Workers of an elastic job in leases, on a cluster that schedules tasks: Spark or Ray.

Every slot is a *lease*: a task that stays through all generations and runs one worker at a time. Leases without free
resources wait in the cluster's queue, so that its autoscaler adds nodes. A lease that is lost is submitted again. If
the cluster announces the end of a lease's node, the lease ends once its rank has left the job at a commit.

Two jobs could wait for each other forever if each holds some slots but not enough to start. So if a job holds too few
slots to start while others use the cluster, it gives its slots back after a random time. It requests slots again after
another random time.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import SystemRandom
from typing import Protocol

from sparkhvd._util.background import in_background, is_done_within
from sparkhvd.comm.connect.launch_context import MembershipAddress
from sparkhvd.deadline import Deadline
from sparkhvd.driver.elastic.lease_book import LeaseBook
from sparkhvd.driver.elastic.roster import Cooldown
from sparkhvd.driver.elastic.workers import DiscoveryFailed, Event
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.rpc.server import Server
from sparkhvd.task.elastic.worker import Lost
from sparkhvd.task.failure_report import FailureReport
from sparkhvd.task.job import Job

# How long a lease's task may take to end its worker and itself, before it is cancelled.
_END_SECONDS = 8.0
# The pause before a lease is submitted again.
_PAUSE = Cooldown(shortest=0.5, longest=30.0)
# How long a job holds too few slots before it gives them back; the time doubles with every return.
_HOLD_SECONDS = (10.0, 20.0)
# How long a job requests no slots after it has given its slots back.
_AWAY_SECONDS = (2.0, 10.0)
# The interval at which the driver asks for the slots of the cluster, and which of its nodes are about to end.
_WATCH_SECONDS = 1.0


class LeaseCluster(Protocol):
    """Runs the tasks of leases. Several threads call its methods.

    Attributes:
        name: the name of the cluster in messages.
        loss: why a worker was lost whose task has ended, for messages.
    """

    name: str
    loss: str

    def addresses(self) -> tuple[str, str]:
        """Return the name or address by which tasks reach this driver, and the local address to bind."""

    def inheriting(self, act: Callable[[], None]) -> Callable[[], None]:
        """Return a function for another thread that calls ``act`` with the settings of this thread."""

    def run(self, number: int, job: Job, membership: MembershipAddress) -> Exception | None:
        """Submit the task of a lease and wait for its end; return its error or None."""

    def cancel(self, number: int, done: Future[None]) -> None:
        """End the task of a lease unless ``done``, also while it waits for resources."""

    def is_stopped(self) -> bool:
        """Return whether this process is no longer connected to the cluster."""

    def explain(self, error: Exception) -> tuple[str, bool]:
        """Return the message for an error of ``run``, and whether the job cannot continue."""

    def others_run(self, submitted: int, connected: int) -> bool:
        """Return whether others use the cluster, besides this many submitted and connected leases of the job."""

    def leaving(self, attempts: Mapping[int, int]) -> Mapping[int, str]:
        """Return the leases whose nodes are about to end, with the event; ``attempts`` has the attempt by lease."""

    def slots(self) -> int:
        """Return how many leases have room in the cluster, or 0 if the number of leases is constant."""


@dataclass
class _Run:
    """One task of a lease; ``given_back`` means that it ends because the elastic job gives its slots back."""

    done: Future[None] = field(default_factory=Future)
    given_back: bool = False


class LeaseWorkers:
    """Starts workers in the leases of a cluster.

    Args:
        cluster: runs the tasks of the leases.
        job: the job of the workers.
        slots: the number of leases; more are added if the cluster has more ``slots``.
        min_slots: the number of slots that the job needs to start.
        membership: the address of the membership server, without a worker's number.
        stream: receives the workers' output.
        inbox: receives the offered slots and the ends of workers.
    """

    def __init__(  # noqa: PLR0917
        self,
        cluster: LeaseCluster,
        job: Job,
        slots: int,
        min_slots: int,
        membership: MembershipAddress,
        stream: LogStream,
        inbox: queue.SimpleQueue[Event],
    ) -> None:
        self._cluster = cluster
        self._inbox = inbox
        self._book = LeaseBook(job, stream, inbox, cluster.loss)
        self._closing = threading.Event()
        self._min_slots = min_slots
        self._back_at = 0.0  # when the job requests slots again; written before ``given_back`` of its runs
        own_host, bind_host = cluster.addresses()
        with ExitStack() as stack:
            server = stack.enter_context(
                Server(
                    job.secret,
                    self._book,
                    bind_host,
                    name="sparkhvd-elastic",
                    encrypt=job.config.encrypt,
                    host_timeout=job.config.host_timeout,
                    on_ended=self._book.on_ended,
                )
            )
            addresses = tuple(dict.fromkeys([(bind_host, server.port), (own_host, server.port)]))
            job = job.with_driver_addresses(addresses)
            self._run_task = functools.partial(cluster.run, job=job, membership=membership)
            self._leases: list[Future[None]] = []  # the threads, by number; only appended to, by one thread at a time
            self._runs: dict[int, _Run] = {}  # by lease; replaced by its own thread
            self._add_leases(slots)
            self._threads = [
                in_background(self._share_slots, "sparkhvd-lease-sharing"),
                in_background(self._watch_nodes, "sparkhvd-lease-nodes"),
            ]
            self._stack = stack.pop_all()

    def note_offer(self, capacity: Mapping[str, int]) -> dict[str, str]:  # noqa: ARG002 - the leases offered them
        """Return no host: workers can run on every host that has leases."""
        return {}

    def start(self, worker: int, host: str) -> None:
        """Start a worker: report ``WorkerStarting``, or ``Lost``."""
        if not self._book.start(worker, host):
            why = f"did not start: its {self._cluster.name} task has just ended"
            self._inbox.put(Lost(worker, FailureReport(worker, host, why)))

    def assign(self, worker: int, rank: int) -> None:
        """Note the rank of a worker in a new generation."""
        self._book.set_rank(worker, rank)

    def stop(self, worker: int) -> None:
        """Begin to end a worker, without waiting for its end."""
        self._book.stop(worker)

    def close(self) -> None:
        """End all workers and their tasks, and wait for their ends."""
        self._closing.set()
        with self._stack as stack:  # takes every step, even if another Ctrl-C interrupts one
            stack.callback(self._end_leases)
            wait(self._threads)

    def _add_leases(self, slots: int) -> None:
        for number in range(len(self._leases), slots):
            self._runs[number] = _Run()
            keep = self._cluster.inheriting(functools.partial(self._keep_lease, number))
            self._leases.append(in_background(keep, "sparkhvd-lease"))

    def _end_leases(self) -> None:
        connected = self._connected()
        self._book.end()
        self._await_ends(connected, self._leases)

    def _connected(self) -> list[bool]:
        return [self._book.is_connected(number) for number in range(len(self._leases))]

    def _await_ends(self, connected: Sequence[bool], ends: Sequence[Future[None]]) -> None:
        """Wait for the ends of the leases' tasks; cancel tasks that wait for resources or do not end in time."""
        end = Deadline.after(_END_SECONDS)
        for is_connected, number in sorted(zip(connected, range(len(ends)), strict=True)):
            if is_connected or self._cluster.is_stopped():  # its task ends by itself
                is_done_within(ends[number], end.remaining())
            self._cluster.cancel(number, ends[number])

    def _watch_nodes(self) -> None:
        """Withdraw the slots of nodes that are about to end, so that their ranks leave before they are lost.

        Also add leases for slots that the cluster has gained, if their number is not limited.
        """
        while not self._closing.wait(_WATCH_SECONDS):
            attempts = self._book.tasks()
            for number, why in self._cluster.leaving(attempts).items():
                self._book.withdraw(number, attempts[number], why)
            self._add_leases(self._cluster.slots())

    def _share_slots(self) -> None:
        """Give the job's slots back while they are too few to start, until the first generation has formed."""
        random = SystemRandom()
        factor = 1.0
        while not self._book.has_formed():
            was_short = self._book.is_short(self._min_slots)
            if self._closing.wait(factor * random.uniform(*_HOLD_SECONDS)):
                return
            if was_short and self._book.is_short(self._min_slots) and self._others_run():
                self._give_way(random.uniform(*_AWAY_SECONDS))
                factor *= 2

    def _others_run(self) -> bool:
        return self._cluster.others_run(len(self._leases), len(self._book.tasks()))

    def _give_way(self, seconds: float) -> None:
        """Give all slots back, and request none for some seconds."""
        self._back_at = time.monotonic() + seconds
        runs = [self._runs[number] for number in range(len(self._leases))]
        for run in runs:
            run.given_back = True
        connected = self._connected()[: len(runs)]
        count = self._book.give_back(self._min_slots)
        if count == 0:
            for run in runs:
                run.given_back = False
            return
        why = (
            f"The job held {count} of the {self._min_slots} slots that it needs to start, while other "
            f"{self._cluster.name} jobs held or waited for resources. It gave its slots back, so that two jobs do not "
            "wait for each other, and will request slots again"
        )
        self._inbox.put(DiscoveryFailed(why, False))
        self._await_ends(connected, [run.done for run in runs])

    def _keep_lease(self, number: int) -> None:
        """Run the tasks of a lease, one after the other, until the elastic job ends."""
        failures = 0
        while not self._closing.is_set():
            run = self._runs[number] = _Run()
            error = self._run_task(number)
            run.done.set_result(None)
            if run.given_back:
                self._closing.wait(max(0.0, self._back_at - time.monotonic()))
                continue
            failures = 1 if self._book.take_connected(number) else failures + 1
            if error is not None and not self._closing.is_set():
                why, is_final = self._cluster.explain(error)
                is_final = is_final or self._cluster.is_stopped() or not self._book.heard.is_set()
                self._inbox.put(DiscoveryFailed(why, is_final))
                if is_final:
                    return
            self._closing.wait(_PAUSE.seconds(failures))
