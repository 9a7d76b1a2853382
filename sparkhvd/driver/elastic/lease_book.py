"""The leases of an elastic job: the tasks that hold its slots, on Spark or Ray, and what they report."""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from sparkhvd.driver.elastic.workers import Event, Offered, WorkerStarting
from sparkhvd.driver.launcher import warn_of_versions
from sparkhvd.driver.log_stream import LogStream
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
from sparkhvd.task.elastic.worker import Lost, WorkerLocation, WorkerResult
from sparkhvd.task.failure_report import FailureReport
from sparkhvd.task.job import Job

logger = logging.getLogger(__name__)


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
        loss: why a worker was lost whose task has ended.
    """

    def __init__(self, job: Job, stream: LogStream, inbox: queue.SimpleQueue[Event], loss: str) -> None:
        self._loss = loss
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
                self._inbox.put(Lost(lease.worker, FailureReport(rank, lease.host, self._loss)))
            self._inbox.put(self._capacity())  # while holding the lock, so that the newest capacity comes last
        logger.info("A task of the elastic job on host %s has ended: %s", task.host, error)

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

    def withdraw(self, number: int, attempt: int, why: str) -> None:
        """Withdraw the slot of a lease: its worker leaves at the next commit, and then the task ends.

        Args:
            number: the number of the lease.
            attempt: the attempt of its task.
            why: the event, in front of the rank's name, for a warning.
        """
        with self._lock:
            lease = self._leases.get(number)
            if lease is None or lease.attempt != attempt or lease.withdrawn:
                return
            lease.withdrawn = True
            self._inbox.put(self._capacity())
            if lease.worker is not None:
                who = f"rank {self._ranks[lease.worker]}" if lease.worker in self._ranks else "a new rank"
                logger.warning("%s of %s on host %s; the rank leaves the job at its next commit.", why, who, lease.host)
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
