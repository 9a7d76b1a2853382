"""Watching one worker until the whole job has an outcome.

The tasks agree through two kinds of rendezvous keys, which keep their first value:

- ``outcome``: the report of the first failing rank, or empty once all ranks have returned;
- ``finished/<rank>``: the worker of that rank is done, with the size of its result.

So the first failure wins, every task learns it, and every task ends.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sparkhvd.comm.connect.rendezvous import RendezvousClient
from sparkhvd.comm.stall.stragglers import INIT, published_straggler
from sparkhvd.deadline import Deadline
from sparkhvd.errors import DeadlineExceededError, LaunchError, SparkHvdError
from sparkhvd.task.failure_report import (
    CONNECTED,
    ENDED,
    IN_FN,
    NOT_STARTED,
    STARTING,
    TOO_LARGE,
    FailureReport,
    describe_exit,
)
from sparkhvd.task.worker.process import Exited, WorkerProcess
from sparkhvd.task.worker.spec import FnEnded, Joined, Leave, Raised, Ready, Returned

logger = logging.getLogger(__name__)

OUTCOME = "outcome"
# A job may run for weeks; what ends these waits is an event, and the death of the server is one.
JOB_SECONDS = 400 * 86400.0
# One exchange with the rendezvous server, which answers at once unless its host is overloaded.
NOTE_SECONDS = 30.0
# After a failure elsewhere: time to fail by itself (its collectives do), then time for SIGTERM. With the time for the
# last output these stay below the 5 s within which a failed job's processes are gone.
GRACE_SECONDS = 1.5
TERM_SECONDS = 1.0
# A rank that failed because it lost another waits this long for the other's report.
_SECONDARY_SECONDS = 4.0
# What a process may take to end after fn has returned: the user's exit handlers run then.
EXIT_SECONDS = 10.0
_NOT_PACKED = (
    "did not deliver the result of fn within {seconds:g} s (SPARKHVD_RESULT_TIMEOUT) after fn ended: it is still "
    "pickling the result or leaving the job. Return plain data, or write large results to a Store and return their path"
)
# How often a waiting task looks whether its executor still lives: nobody else tells it.
_PARENT_CHECK_SECONDS = 5.0
# How long the others have to end once a rank has failed; looked for that often.
_FAILED_SECONDS = 6.0
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Outcome:
    """How the job ended: with a failure, or without."""

    failure: FailureReport | None


@dataclass(frozen=True)
class ServerLost:
    """The task that serves the rendezvous is gone."""

    why: str


@dataclass(frozen=True)
class Supervision:
    """One rank's view of the job, and how it reaches the others.

    Attributes:
        rank: which rank this is.
        host: where it runs.
        client: connection to the job's rendezvous server.
        start_deadline: when its worker has to be ready.
        hosts: of all ranks, in rank order.
        parent: the process that this one must not outlive, for example a task's executor; 0 when there is none.
        reach: told how far the rank is, whenever that changes; must not block.
    """

    rank: int
    host: str
    client: RendezvousClient
    start_deadline: Deadline
    hosts: Sequence[str] = ()
    parent: int = 0
    reach: Callable[[str], None] = lambda _: None

    def orphaned(self) -> bool:
        return self.parent != 0 and os.getppid() != self.parent


def watch_outcome(client: RendezvousClient, events: queue.SimpleQueue[object]) -> threading.Thread:
    """A thread that puts the job's ``Outcome`` (or ``ServerLost``) into ``events``; closing the client ends it."""

    def watch() -> None:
        try:
            content = client.get(OUTCOME, Deadline.after(JOB_SECONDS))
            events.put(Outcome(FailureReport.from_json(content) if content else None))
        except SparkHvdError as error:
            events.put(ServerLost(str(error)))

    thread = threading.Thread(target=watch, name="sparkhvd-outcome", daemon=True)
    thread.start()
    return thread


def supervise(worker: WorkerProcess, job: Supervision) -> bytes | Outcome:
    """Wait until the worker is done or the job has failed elsewhere; the worker has ended afterwards.

    Returns:
        The worker's result, or the outcome that made it worthless.

    Raises:
        LaunchError: infrastructure was lost; Spark should run the stage again.
    """
    event = _first_end(worker, job)
    if isinstance(event, Returned):
        _let_go(worker, job)
        return event.content
    if isinstance(event, FailureReport):
        return _settle_failure(worker, job, event)
    if isinstance(event, Outcome):
        worker.wait_for_exit(GRACE_SECONDS)
        worker.close(TERM_SECONDS)
        return event
    worker.close(TERM_SECONDS)
    raise _lost(job, event)


def _let_go(worker: WorkerProcess, job: Supervision) -> None:
    """Let a worker end that has returned. Its result counts, however its process ends."""
    worker.send(Leave(EXIT_SECONDS))
    ended = worker.wait_for_exit(EXIT_SECONDS)
    worker.close()
    if not ended:
        worker.output.add(
            "stderr",
            f"sparkhvd: Rank {job.rank} on host {job.host} returned, but its process did not end within "
            f"{EXIT_SECONDS:g} s and was killed. An exit handler or a non-daemon thread is still running; the stacks "
            "above show where.",
        )


def _first_end(worker: WorkerProcess, job: Supervision) -> Returned | FailureReport | Outcome | ServerLost:
    deadline = job.start_deadline
    late = FailureReport(job.rank, job.host, "was not ready to run fn in time", kind=NOT_STARTED)
    phase, packing = STARTING, False
    while True:
        try:
            event = worker.events.get(timeout=deadline.capped(_PARENT_CHECK_SECONDS).remaining())
        except queue.Empty:
            if job.orphaned():
                return ServerLost("the executor of this task has ended")
            if deadline.expired():
                return late
            continue
        if isinstance(event, Ready):
            deadline = Deadline.after(JOB_SECONDS)  # fn may run for weeks
            phase = IN_FN
            job.reach(phase)
        if isinstance(event, Joined):
            phase = CONNECTED
            job.reach(phase)
        if isinstance(event, FnEnded):
            deadline = Deadline.after(event.seconds)
            late = FailureReport(job.rank, job.host, _NOT_PACKED.format(seconds=event.seconds))
            packing = True
            job.reach(ENDED)
        if isinstance(event, Returned | FailureReport | Outcome | ServerLost):
            return event
        if isinstance(event, Raised | Exited):
            return _failure(event, job, phase, packing)


def _failure(event: Raised | Exited, job: Supervision, phase: str, packing: bool) -> FailureReport:
    """The report of a worker's end; ``phase`` is how far it was in ``fn``, or before."""
    if isinstance(event, Exited):
        where = ENDED if packing else phase
        cause = describe_exit(event.returncode)
        return FailureReport(job.rank, job.host, cause, phase=where, secondary=event.by_launcher)
    where = phase if event.phase is None else event.phase
    return FailureReport(
        job.rank, job.host, event.cause, traceback=event.traceback, phase=where, secondary=event.secondary
    )


def _settle_failure(worker: WorkerProcess, job: Supervision, report: FailureReport) -> Outcome:
    """Note the failure for all, unless another rank's was the cause; then end the worker."""
    report = replace(report, stderr_tail=worker.output.stderr_tail())
    if report.secondary:
        primary = _outcome_within(worker, _SECONDARY_SECONDS)
        if primary is not None:
            worker.close(TERM_SECONDS)
            return primary
    noted = _straggler_report(job) if report.secondary else None
    if report.traceback == "":
        worker.close(TERM_SECONDS)  # so that the last words on stderr are complete
        report = replace(report, stderr_tail=worker.output.stderr_tail())
    job.client.set(OUTCOME, (noted or report).to_json(), Deadline.after(NOTE_SECONDS))
    if report.traceback != "":
        worker.send(Leave(GRACE_SECONDS))
        worker.wait_for_exit(GRACE_SECONDS)
        worker.close(TERM_SECONDS)
    return Outcome(FailureReport.from_json(job.client.get(OUTCOME, Deadline.after(NOTE_SECONDS))))


def _straggler_report(job: Supervision) -> FailureReport | None:
    """The report of the rank that kept the others waiting, where they have told which it is."""
    straggler = published_straggler(job.client)
    if straggler is None:
        return None
    where = f"held up the other ranks ({CONNECTED})" if straggler.joined else f"did not reach {INIT}"
    return FailureReport(
        straggler.rank, job.hosts[straggler.rank], f"{where}: {straggler.why}", traceback=straggler.stack
    )


def _outcome_within(worker: WorkerProcess, seconds: float) -> Outcome | None:
    deadline = Deadline.after(seconds)
    while not deadline.expired():
        try:
            event = worker.events.get(timeout=max(deadline.remaining(), 0.001))
        except queue.Empty:
            return None
        if isinstance(event, Outcome):
            return event
    return None


def await_outcome(events: queue.SimpleQueue[object], job: Supervision) -> Outcome:
    """The outcome of the job, for as long as the other ranks take.

    Raises:
        LaunchError: infrastructure was lost; Spark should run the stage again.
    """
    while True:
        try:
            event = events.get(timeout=_PARENT_CHECK_SECONDS)
        except queue.Empty:
            if job.orphaned():
                raise _lost(job, ServerLost("the executor of this task has ended")) from None
            continue
        if isinstance(event, Outcome):
            return event
        if isinstance(event, ServerLost):
            raise _lost(job, event)


def _lost(job: Supervision, event: ServerLost) -> LaunchError:
    return LaunchError(
        f"Rank {job.rank} on host {job.host} lost the task that coordinates the job: {event.why}. Spark retries the "
        "job unless it has failed too often. See the executors' logs for why the task was lost."
    )


def conclude(client: RendezvousClient, hosts: Sequence[str], result_cap: int) -> None:
    """Wait until every rank has finished, then set the outcome; done by the task that serves the rendezvous.

    A failing rank sets the outcome before it finishes, so what this sets counts only when none failed. Those that do
    not answer are not waited for for long then: their host may be gone.
    """
    deadline, sizes = Deadline.after(JOB_SECONDS), list[int]()
    while len(sizes) < len(hosts):
        try:
            sizes.append(int(client.get(finished_key(len(sizes)), deadline.capped(_LOOK_SECONDS))))
        except DeadlineExceededError:
            if deadline.expired():
                return
            if _has_failed(client):
                deadline = deadline.capped(_FAILED_SECONDS)
    report = size_failure(sizes, hosts, result_cap)
    client.set(OUTCOME, b"" if report is None else report.to_json(), Deadline.after(NOTE_SECONDS))


def _has_failed(client: RendezvousClient) -> bool:
    try:
        client.get(OUTCOME, Deadline.after(0.0))
    except DeadlineExceededError:
        return False
    return True


def size_failure(sizes: Sequence[int], hosts: Sequence[str], cap: int) -> FailureReport | None:
    """The failure that too large results are, or None."""
    if sum(sizes) <= cap:
        return None
    rank = max(range(len(sizes)), key=sizes.__getitem__)
    cause = (
        f"returned {sizes[rank]:,} bytes, and all ranks together returned {sum(sizes):,}; the driver accepts at most "
        f"{cap:,} bytes. Write large results to a Store from within fn and return their path"
    )
    return FailureReport(rank, hosts[rank], cause, kind=TOO_LARGE)


def wait_for_leave(client: RendezvousClient, size: int, seconds: float = 5.0) -> None:
    """Keep the server until the other tasks have read the outcome."""
    deadline = Deadline(time.monotonic() + seconds)
    for rank in range(1, size):
        try:
            client.get(left_key(rank), deadline)
        except DeadlineExceededError:
            logger.warning("Rank %d did not confirm that it has read the job's outcome.", rank)


def finished_key(rank: int) -> str:
    return f"finished/{rank}"


def left_key(rank: int) -> str:
    return f"left/{rank}"
