"""Workers of an elastic job in Spark tasks.

Every slot is a *lease*: a Spark job of one ordinary task, which stays through all generations and runs one worker at a
time. Leases without a free core wait in Spark's queue, so dynamic allocation requests executors. A lease that is lost
is submitted again. If Spark decommissions an executor, its leases end once their ranks have left the job at a commit.

Two jobs could wait for each other forever if each holds some slots but not enough to start. So if a job holds too few
slots to start while other Spark jobs run, it gives its slots back after a random time. It requests slots again after
another random time.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import SystemRandom
from typing import TYPE_CHECKING

from sparkhvd._util.background import in_background, is_done_within
from sparkhvd.comm.connect.launch_context import MembershipAddress
from sparkhvd.compat.spark import inheriting, is_connect, is_stopped
from sparkhvd.data.spark.job import add_tag, cancel, new_tag
from sparkhvd.deadline import Deadline
from sparkhvd.driver.elastic.roster import Cooldown
from sparkhvd.driver.elastic.workers import DiscoveryFailed, Event, Offered, WorkerStarting
from sparkhvd.driver.launcher import warn_of_versions
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.spark.decommissioning import Decommissioning
from sparkhvd.driver.spark.driver_address import driver_hosts
from sparkhvd.driver.spark.gateway import GatewayPipe
from sparkhvd.driver.spark.job_failures import has_ended, is_cancelled, spark_failure
from sparkhvd.rpc.messages import (
    Acknowledged,
    EndLease,
    Message,
    NextCommand,
    OfferSlot,
    Rejected,
    SetRank,
    StartWorker,
    StopWorker,
    TaskStatus,
    WorkerLost,
    WorkerReturned,
)
from sparkhvd.rpc.registration import Introduction, TaskOffer
from sparkhvd.rpc.server import Server
from sparkhvd.task.elastic.lease import run_lease
from sparkhvd.task.elastic.worker import Lost, WorkerLocation, WorkerResult
from sparkhvd.task.entry import TaskFunction, entry_of
from sparkhvd.task.failure_report import FailureReport
from sparkhvd.task.job import RESULT_SCHEMA, Job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

# How long a lease's task may take to end its worker and itself, before its Spark job is cancelled.
_END_SECONDS = 8.0
# The pause before a lease is submitted again.
_PAUSE = Cooldown(shortest=0.5, longest=30.0)
# How long a job holds too few slots before it gives them back; the time doubles with every return.
_HOLD_SECONDS = (10.0, 20.0)
# How long a job requests no slots after it has given its slots back.
_AWAY_SECONDS = (2.0, 10.0)
# The interval at which the driver asks which executors are being decommissioned.
_WATCH_SECONDS = 1.0


@dataclass
class _Lease:
    """A connected task, its worker and its pending commands; ``host`` is a name that no other host has."""

    attempt: int
    offer: TaskOffer
    host: str
    worker: int | None = None
    commands: deque[Message] = field(default_factory=deque)
    waiting: Future[Message] | None = None
    withdrawn: bool = False


class LeaseBook:
    """The connected leases, and the handler of their messages. No method waits.

    Args:
        job: the job.
        stream: receives the workers' output.
        inbox: receives the slots that the leases offer, and the ends of their workers.
    """

    def __init__(self, job: Job, stream: LogStream, inbox: queue.SimpleQueue[Event]) -> None:
        self._job = job
        self._stream = stream
        self._inbox = inbox
        self._lock = threading.Lock()  # guards the fields below, up to _has_formed
        self._leases: dict[int, _Lease] = {}
        self._results: dict[int, list[bytes]] = {}  # the parts that have arrived, by worker
        self._ranks: dict[int, int] = {}  # by worker, for messages
        self._connected: set[int] = set()  # the leases that have connected since ``take_connected``
        self._ended = False
        self._has_formed = False  # whether a generation has formed
        self.heard = threading.Event()  # set when a lease has offered a slot

    def handle(self, message: Message) -> Message | Future[Message] | None:
        if isinstance(message, OfferSlot):
            return self._offer(message.introduction)
        if isinstance(message, NextCommand):
            return self._next_command(message)
        if isinstance(message, WorkerReturned):
            self._add_result(message)
        elif isinstance(message, WorkerLost):
            self._free(message.worker)
            self._inbox.put(Lost(message.worker, FailureReport.from_json(message.content)))
        elif not isinstance(message, TaskStatus):
            return self._stream.handle(message)
        return None

    def on_ended(self, task: TaskStatus, error: Exception) -> None:
        """Note that the connection of a task has ended, which also ends the task's worker."""
        with self._lock:
            lease = self._leases.get(task.task_index)
            if lease is None or lease.attempt != task.attempt:
                return
            del self._leases[task.task_index]
            if lease.worker is not None:
                self._results.pop(lease.worker, None)
                rank = self._ranks.pop(lease.worker, lease.worker)
                why = (
                    "was lost with its Spark task: its executor or its Python process has ended, or its host is cut off"
                )
                self._inbox.put(Lost(lease.worker, FailureReport(rank, lease.host, why)))
            self._inbox.put(self._capacity())  # while holding the lock, so that the newest capacity comes last
        logger.info("A Spark task of the elastic job on host %s has ended: %s", task.host, error)

    def start(self, worker: int, host: str) -> bool:
        """Start a worker in a free lease on a host; False if the lease has just been lost."""
        with self._lock:
            lease = next(
                (
                    candidate
                    for candidate in self._leases.values()
                    if candidate.host == host and candidate.worker is None and not candidate.withdrawn
                ),
                None,
            )
            if lease is None:
                return False
            lease.worker = worker
            location = WorkerLocation(lease.offer.host_hash, lease.host, lease.offer.bind_host)
            self._inbox.put(WorkerStarting(worker, location))
        self._command(lease, StartWorker(worker))
        return True

    def set_rank(self, worker: int, rank: int) -> None:
        with self._lock:
            self._has_formed = True
            self._ranks[worker] = rank
            lease = self._lease_of(worker)
        if lease is not None:
            self._command(lease, SetRank(worker, rank))

    def stop(self, worker: int) -> None:
        """Make the task end a worker; its slot is free at once."""
        with self._lock:
            lease = self._lease_of(worker)
        self._free(worker)
        if lease is not None and not lease.withdrawn:
            self._command(lease, StopWorker(worker))

    def withdraw(self, number: int, attempt: int) -> None:
        """Withdraw the slot of a lease: its worker leaves at the next commit, and then the task ends."""
        with self._lock:
            lease = self._leases.get(number)
            if lease is None or lease.attempt != attempt or lease.withdrawn:
                return
            lease.withdrawn = True
            self._inbox.put(self._capacity())
            if lease.worker is not None:
                who = f"rank {self._ranks[lease.worker]}" if lease.worker in self._ranks else "a new rank"
                logger.warning(
                    "Spark decommissions the executor of %s on host %s; the rank leaves the job at its next commit.",
                    who,
                    lease.host,
                )
            waiting = self._take_ended(lease)
        if waiting is not None:
            waiting.set_result(EndLease())

    def end(self) -> None:
        """Make all tasks end, including tasks that connect later."""
        with self._lock:
            self._ended = True
            waiting = self._take_requests()
        for future in waiting:
            future.set_result(EndLease())

    def is_short(self, min_slots: int) -> bool:
        """Return whether the job holds slots, but too few to start."""
        with self._lock:
            return not self._has_formed and 0 < len(self._leases) < min_slots

    def has_formed(self) -> bool:
        with self._lock:
            return self._has_formed

    def give_back(self, min_slots: int) -> int:
        """Make the connected tasks end if they are too few to start, and return their number; otherwise return 0."""
        with self._lock:
            count = len(self._leases)
            if self._has_formed or count >= min_slots:
                return 0
            waiting = self._take_requests()
            self._leases.clear()  # so a task that asks later gets EndLease
            self._inbox.put(self._capacity())
        for future in waiting:
            future.set_result(EndLease())
        return count

    def tasks(self) -> dict[int, int]:
        """Return the attempts of the connected tasks whose slots are not withdrawn, by lease."""
        with self._lock:
            return {number: lease.attempt for number, lease in self._leases.items() if not lease.withdrawn}

    def is_connected(self, lease: int) -> bool:
        with self._lock:
            return lease in self._leases

    def take_connected(self, lease: int) -> bool:
        """Return whether a lease has connected since the last call."""
        with self._lock:
            was_connected = lease in self._connected
            self._connected.discard(lease)
            return was_connected

    def _offer(self, introduction: Introduction) -> Message:
        offer, number = introduction.offer, introduction.offer.task_index
        with self._lock:
            if self._ended:
                return EndLease()
            if number in self._leases:
                return Rejected("Another attempt of the task holds this lease.")
            self._leases[number] = _Lease(introduction.attempt, offer, self._distinct_name(offer))
            self._connected.add(number)
            self._inbox.put(self._capacity())
        if not self.heard.is_set():
            self.heard.set()
            warn_of_versions(self._job, [offer])
        return Acknowledged()

    def _distinct_name(self, offer: TaskOffer) -> str:
        """Return the name of a task's host, with its address or key if another host has the same name.

        The policy counts slots, pauses and broken connections by name, but containers may all have one name.
        """
        hosts = {lease.host: lease.offer.host_hash for lease in self._leases.values()}
        names = (offer.host, f"{offer.host} ({offer.bind_host})", f"{offer.host} ({offer.host_hash})")
        known = next((name for name, key in hosts.items() if key == offer.host_hash), None)
        return known or next((name for name in names if name not in hosts), names[-1])

    def _next_command(self, message: NextCommand) -> Message | Future[Message]:
        with self._lock:
            lease = self._leases.get(message.lease)
            if self._ended or lease is None or lease.attempt != message.attempt:
                return EndLease()
            if lease.commands:
                return lease.commands.popleft()
            lease.waiting = Future()
            return lease.waiting

    def _command(self, lease: _Lease, command: Message) -> None:
        with self._lock:
            waiting, lease.waiting = lease.waiting, None
            if waiting is None:
                lease.commands.append(command)
        if waiting is not None:  # setting the result sends it, so this holds no lock
            waiting.set_result(command)

    def _add_result(self, message: WorkerReturned) -> None:
        with self._lock:
            parts = self._results.setdefault(message.worker, [])
            parts.append(message.content)
            if not message.is_last:
                return
            del self._results[message.worker]
        self._free(message.worker)
        self._inbox.put(WorkerResult(message.worker, b"".join(parts)))

    def _free(self, worker: int) -> None:
        """Note that a worker ends or has ended; a task whose slot is withdrawn ends with it."""
        with self._lock:
            self._ranks.pop(worker, None)
            lease = self._lease_of(worker)
            if lease is None:
                return
            lease.worker = None
            waiting = self._take_ended(lease)
        if waiting is not None:
            waiting.set_result(EndLease())

    def _take_ended(self, lease: _Lease) -> Future[Message] | None:
        """Remove a lease without a worker whose slot is withdrawn; return the request that ends its task, if it waits.

        A task without a waiting request gets ``EndLease`` when it asks again.
        """
        if not lease.withdrawn or lease.worker is not None:
            return None
        del self._leases[lease.offer.task_index]
        waiting, lease.waiting = lease.waiting, None
        return waiting

    def _take_requests(self) -> list[Future[Message]]:
        """Return the waiting requests of all tasks, each of which the caller must answer."""
        waiting = [lease.waiting for lease in self._leases.values() if lease.waiting is not None]
        for lease in self._leases.values():
            lease.waiting = None
        return waiting

    def _lease_of(self, worker: int) -> _Lease | None:
        return next((lease for lease in self._leases.values() if lease.worker == worker), None)

    def _capacity(self) -> Offered:
        leases = self._leases.values()
        slots = Counter(lease.host for lease in leases if not lease.withdrawn)
        withdrawn = frozenset(lease.worker for lease in leases if lease.withdrawn and lease.worker is not None)
        return Offered(dict(slots), withdrawn)


@dataclass
class _Run:
    """One Spark job of a lease; ``given_back`` means that it ends because the elastic job gives its slots back."""

    done: Future[None] = field(default_factory=Future)
    given_back: bool = False


class SparkWorkers:
    """Starts workers in Spark tasks.

    Args:
        spark: the session.
        job: the job of the workers.
        slots: the number of leases.
        min_slots: the number of slots that the job needs to start.
        membership: the address of the membership server, without a worker's number.
        stream: receives the workers' output.
        inbox: receives the offered slots and the ends of workers.
    """

    def __init__(  # noqa: PLR0917
        self,
        spark: SparkSession,
        job: Job,
        slots: int,
        min_slots: int,
        membership: MembershipAddress,
        stream: LogStream,
        inbox: queue.SimpleQueue[Event],
    ) -> None:
        self._spark = spark
        self._gateway = GatewayPipe(spark)
        self._inbox = inbox
        self._book = LeaseBook(job, stream, inbox)
        self._closing = threading.Event()
        self._min_slots = min_slots
        self._back_at = 0.0  # when the job requests slots again; written before ``given_back`` of its runs
        own_host, bind_host = driver_hosts(spark)
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
            self._leases: list[tuple[str, Future[None]]] = []  # by number: the tag of the Spark jobs, and the thread
            self._runs = {number: _Run() for number in range(slots)}  # by lease; replaced by its own thread
            for number in range(slots):
                tag = new_tag()
                keep = functools.partial(
                    self._keep_lease, number, tag, functools.partial(run_lease, job, membership, number)
                )
                # The thread inherits the user's job group, description and scheduler pool.
                self._leases.append((tag, in_background(inheriting(spark, keep), "sparkhvd-lease")))
            self._threads = [
                in_background(self._share_slots, "sparkhvd-lease-sharing"),
                in_background(self._watch_executors, "sparkhvd-decommissioning"),
            ]
            self._stack = stack.pop_all()

    def note_offer(self, capacity: Mapping[str, int]) -> dict[str, str]:  # noqa: ARG002 - the leases offered them
        """Return no host: workers can run on every host that has leases."""
        return {}

    def start(self, worker: int, host: str) -> None:
        """Start a worker: report ``WorkerStarting``, or ``Lost``."""
        if not self._book.start(worker, host):
            self._inbox.put(Lost(worker, FailureReport(worker, host, "did not start: its Spark task has just ended")))

    def assign(self, worker: int, rank: int) -> None:
        """Note the rank of a worker in a new generation."""
        self._book.set_rank(worker, rank)

    def stop(self, worker: int) -> None:
        """Begin to end a worker, without waiting for its end."""
        self._book.stop(worker)

    def close(self) -> None:
        """End all workers and their Spark jobs, and wait for their ends."""
        self._closing.set()
        with self._stack as stack:  # takes every step, even if another Ctrl-C interrupts one
            stack.callback(self._end_leases)
            wait(self._threads)

    def _end_leases(self) -> None:
        connected = self._connected()
        self._book.end()
        self._await_ends(connected, [thread for _, thread in self._leases])

    def _connected(self) -> list[bool]:
        return [self._book.is_connected(number) for number in range(len(self._leases))]

    def _await_ends(self, connected: Sequence[bool], ends: Sequence[Future[None]]) -> None:
        """Wait for the leases' Spark jobs to end; cancel jobs that wait for a core or do not end in time."""
        end = Deadline.after(_END_SECONDS)
        tags = [tag for tag, _ in self._leases]
        for is_connected, tag, done in sorted(zip(connected, tags, ends, strict=True), key=lambda entry: entry[0]):
            if is_connected or is_stopped(self._spark):  # its task ends by itself
                is_done_within(done, end.remaining())
            cancel(self._spark, tag, done)

    def _watch_executors(self) -> None:
        """Withdraw the slots of executors that Spark decommissions, so that their ranks leave before they are lost."""
        decommissioning = Decommissioning.of(self._spark)
        while decommissioning is not None and not self._closing.wait(_WATCH_SECONDS):
            for number, attempt in self._book.tasks().items():
                if decommissioning.affects(attempt, self._leases[number][0]):
                    self._book.withdraw(number, attempt)

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
        """Return whether other Spark jobs of this application may wait for cores; always True with Spark Connect."""
        if is_connect(self._spark):
            return True
        try:
            active = self._spark.sparkContext.statusTracker().getActiveJobsIds()
        except Exception as error:  # noqa: BLE001 - the session may have been stopped
            logger.debug("The active Spark jobs are unknown: %s", error)
            return False
        return len(active) > len(self._leases)

    def _give_way(self, seconds: float) -> None:
        """Give all slots back, and request none for some seconds."""
        self._back_at = time.monotonic() + seconds
        runs = [self._runs[number] for number in range(len(self._leases))]
        for run in runs:
            run.given_back = True
        connected = self._connected()
        count = self._book.give_back(self._min_slots)
        if count == 0:
            for run in runs:
                run.given_back = False
            return
        why = (
            f"The job held {count} of the {self._min_slots} slots that it needs to start, while other Spark jobs of "
            "the application held or waited for cores. It gave its slots back, so that two jobs do not wait for each "
            "other, and will request slots again"
        )
        self._inbox.put(DiscoveryFailed(why, False))
        self._await_ends(connected, [run.done for run in runs])

    def _keep_lease(self, number: int, tag: str, task: TaskFunction) -> None:
        """Run the Spark jobs of a lease, one after the other, until the elastic job ends."""
        failures = 0
        while not self._closing.is_set():
            run = self._runs[number] = _Run()
            error = self._run_job(tag, task)
            run.done.set_result(None)
            if run.given_back:
                self._closing.wait(max(0.0, self._back_at - time.monotonic()))
                continue
            failures = 1 if self._book.take_connected(number) else failures + 1
            if error is not None and not self._closing.is_set():
                cancelled = is_cancelled(error)  # by the user, who wants the elastic job to end
                final = cancelled or has_ended(error) or is_stopped(self._spark) or not self._book.heard.is_set()
                why = spark_failure(error) if cancelled else f"A task of the elastic job failed. {spark_failure(error)}"
                self._inbox.put(DiscoveryFailed(why, final))
                if final:
                    return
            self._closing.wait(_PAUSE.seconds(failures))

    def _run_job(self, tag: str, task: TaskFunction) -> Exception | None:
        """Run a Spark job with one task, and return its error or None."""
        try:
            add_tag(self._spark, tag)
            self._spark.range(1, numPartitions=1).mapInArrow(entry_of(task), RESULT_SCHEMA).collect()
        except Exception as error:  # noqa: BLE001 - the session may have been stopped
            return error
        return None
