"""The controller of an elastic job: turns events into decisions of the policy, and carries them out."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Mapping

from sparkhvd._util.texts import first_line
from sparkhvd.comm.connect.membership import CONNECTED, FINISHED, PUBLISHED, SYNCED, WAITING, Assignment, Report
from sparkhvd.driver.elastic.membership_server import MembershipServer
from sparkhvd.driver.elastic.policy import (
    Abandon,
    Decision,
    Done,
    Fail,
    Form,
    LeaveOut,
    Limits,
    Notify,
    Phase,
    Start,
    Stop,
    decide,
    shortage,
)
from sparkhvd.driver.elastic.roster import Cooldown, Roster
from sparkhvd.driver.elastic.workers import DiscoveryFailed, Event, Offered, Reported, Workers, WorkerStarting
from sparkhvd.driver.results import failure_of
from sparkhvd.errors import LaunchError, StartTimeoutError
from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.task.assignment import assign
from sparkhvd.task.elastic.worker import Lost, WorkerLocation, WorkerResult
from sparkhvd.task.failure_report import FailureReport
from sparkhvd.task.job import RESULT_CAP_BYTES

logger = logging.getLogger(__name__)

# The longest time between two rounds of decisions, because some decisions depend only on the time.
_TICK_SECONDS = 0.25


class Controller:
    """Runs one elastic job; used by one thread.

    Args:
        limits: the user's limits.
        cooldown: how long no worker is started on a host after a failure there.
        workers: starts and ends the workers.
        membership: connects the workers to this controller.
        inbox: the events of workers, membership and discovery.
    """

    def __init__(
        self,
        limits: Limits,
        cooldown: Cooldown,
        workers: Workers,
        membership: MembershipServer,
        inbox: queue.SimpleQueue[Event],
    ) -> None:
        self._limits = limits
        self._workers = workers
        self._membership = membership
        self._inbox = inbox
        self._roster = Roster(cooldown, time.monotonic())
        self._locations: dict[int, WorkerLocation] = {}
        self._results: dict[int, bytes] = {}
        self._failures: list[FailureReport] = []  # since the last generation formed, of its ranks or while it is broken
        self._next_worker = 0
        self._unusable: set[str] = set()
        self._published = ""  # the path of the newest published commit
        self._reported_wait: float | None = None  # the start of the wait that was logged last

    def run(self) -> list[bytes]:
        """Run the job and return the pickled results of the ranks of the last generation, in rank order.

        Raises:
            RankFailedError: a rank failed, and the job could not continue.
            StartTimeoutError: not enough ranks were ready within ``start_timeout``.
            LaunchError: the job ended for another reason.
        """
        while True:
            done = self._carry_out_decisions()
            if done is not None:
                return self._within_limit([self._results[worker] for worker in done.workers])
            self._report_shortage()
            try:
                event = self._inbox.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                continue
            self._handle(event)

    def _carry_out_decisions(self) -> Done | None:
        while True:
            decisions = decide(self._roster.view(time.monotonic()), self._limits, time.monotonic())
            if not decisions:
                return None
            for decision in decisions:
                if isinstance(decision, Done):
                    return decision
                self._carry_out(decision)

    def _report_shortage(self) -> None:
        """Log a warning if the job waits for slots, once per wait."""
        now = time.monotonic()
        view = self._roster.view(now)
        if view.gathered_since != self._reported_wait and (text := shortage(view, self._limits, now)):
            self._reported_wait = view.gathered_since
            logger.warning("%s", text)

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Start):
            worker, self._next_worker = self._next_worker, self._next_worker + 1
            self._roster.started(worker, decision.host, time.monotonic())
            self._membership.listen_to(worker)
            self._workers.start(worker, decision.host)
        elif isinstance(decision, Stop):
            member = self._roster.member(decision.worker)
            host = "" if member is None else member.host
            reason = f"Worker {decision.worker} on host {host} was ended: {decision.why}"
            logger.warning("%s.", reason)
            self._workers.stop(decision.worker)
            self._lose(decision.worker, reason, failed=decision.failed)
        elif isinstance(decision, LeaveOut):
            logger.warning("%s.", decision.why)
            for worker in decision.workers:
                self._workers.stop(worker)
                self._lose(worker, decision.why, failed=True)
        elif isinstance(decision, Notify):
            self._roster.notified()
            self._membership.notify(self._roster.generation)
        elif isinstance(decision, Abandon):
            logger.warning("%s.", decision.why)
            self._roster.notified()
            self._membership.report_loss(self._roster.generation, decision.why)
            self._membership.close_rendezvous()
        elif isinstance(decision, Form):
            self._form(decision)
        elif isinstance(decision, Fail):
            raise self._error(decision)

    def _form(self, decision: Form) -> None:
        workers, answer_timeout = decision.workers, None if decision.separated else self._limits.answer_timeout
        if decision.separated:
            logger.warning("%s.", decision.separated)
            self._roster.note(decision.separated)
        previous_generations = {
            worker: member.generation for worker in workers if (member := self._roster.member(worker))
        }
        generation = self._roster.formed(workers, time.monotonic())
        self._failures.clear()
        port = self._membership.open_rendezvous(generation)
        offers = [
            TaskOffer(index, location.host_key, location.host, location.bind_host)
            for index, location in enumerate(self._locations[worker] for worker in workers)
        ]
        slots = assign(offers)  # rank 0 stays first; the others are grouped by host
        self._roster.renumber({workers[slot.offer.task_index]: slot.world.rank for slot in slots})
        for slot in slots:
            worker = workers[slot.offer.task_index]
            self._workers.assign(worker, slot.world.rank)
            host_key, bind_host = slot.offer.host_hash, slot.offer.bind_host
            assignment = Assignment(generation, slot.world, port, host_key, bind_host, self._published, answer_timeout)
            self._membership.assign(worker, previous_generations[worker], assignment)
        logger.info("Generation %d has %d ranks.", generation, len(workers))

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, Reported):
            self._handle_report(event.worker, event.report, now)
        elif isinstance(event, WorkerStarting):
            if self._roster.member(event.worker) is not None:
                self._locations[event.worker] = event.location
        elif isinstance(event, WorkerResult):
            self._results[event.worker] = event.content
            self._roster.returned(event.worker, now)
        elif isinstance(event, Lost):
            self._handle_failure(event.worker, event.failure)
        elif isinstance(event, Offered):
            self._roster.offer(self._usable(event.capacity), event.withdrawn)
        elif isinstance(event, DiscoveryFailed):
            if event.is_final:
                raise LaunchError(event.why)
            logger.warning("%s", event.why)
            self._roster.note(event.why)

    def _handle_report(self, worker: int, report: Report, now: float) -> None:
        member = self._roster.member(worker)
        if report.kind == WAITING:
            counts = self._roster.waiting(worker, report.generation, report.commit, report.reason, now)
            if counts and member is not None and member.phase is Phase.RUNNING and report.reason:
                why = f"Rank {member.rank} on host {member.host} left the generation: {report.reason}"
                self._membership.report_loss(member.generation, why)
                if member.generation == self._roster.generation:
                    self._roster.unreachable(worker, self._membership.unreachable(member.generation, member.rank))
        elif report.kind == CONNECTED:
            self._roster.connected(worker, report.generation)
        elif report.kind == SYNCED:
            self._roster.synced(worker, report.generation, report.commit)
        elif report.kind == FINISHED:
            self._roster.finished(worker, report.generation, now)
        elif report.kind == PUBLISHED:
            if member is not None and member.generation == report.generation == self._roster.generation:
                self._published = report.path
                self._roster.published()
        else:
            logger.warning("Worker %d sent an unknown report %r.", worker, report.kind)

    def _handle_failure(self, worker: int, failure: FailureReport) -> None:
        member = self._roster.member(worker)
        if member is not None:
            # A worker that could not join an intact generation has not ended it.
            if self._roster.is_idle or member.generation == self._roster.generation:
                self._failures.append(failure)
            logger.warning("%s.", failure.sentence().removesuffix("."))
            if not failure.secondary:
                self._roster.raised(worker, failure.error, is_final=failure.is_final)
        self._lose(worker, failure.sentence(), failed=True)

    def _lose(self, worker: int, reason: str, *, failed: bool) -> None:
        member = self._roster.member(worker)
        self._roster.lost(worker, reason, time.monotonic(), failed=failed)
        if self._roster.member(worker) is None:
            self._membership.forget(worker)
            self._locations.pop(worker, None)
        if member is not None and member.phase is Phase.RUNNING:
            self._membership.report_loss(member.generation, first_line(reason))
            self._membership.close_rendezvous()

    def _usable(self, capacity: Mapping[str, int]) -> dict[str, int]:
        unusable = self._workers.note_offer(capacity)
        for host in sorted(unusable.keys() - self._unusable):
            self._unusable.add(host)
            logger.warning("%s.", unusable[host])
            self._roster.note(unusable[host])
        return {host: slots for host, slots in capacity.items() if host not in unusable}

    def _error(self, decision: Fail) -> LaunchError:
        """Return the error for a failed job: that of the first rank that failed in the last generation, if one did."""
        for failure in self._failures:
            if failure.error and failure.error == decision.error:
                return failure_of(failure, decision.why)
        primary = [failure for failure in self._failures if not failure.secondary] or self._failures
        if not decision.started and not primary:
            return StartTimeoutError(decision.why)
        if not primary:
            return LaunchError(decision.why)
        error = failure_of(primary[0])
        error.args = (f"{decision.why}\n\n{error.args[0]}",)
        return error

    @staticmethod
    def _within_limit(results: list[bytes]) -> list[bytes]:
        size = sum(map(len, results))
        if size > RESULT_CAP_BYTES:
            raise LaunchError(
                f"All ranks together returned {size:,} bytes; the driver accepts at most {RESULT_CAP_BYTES:,} bytes. "
                "Write large results to a Store from within fn and return their path."
            )
        return results
