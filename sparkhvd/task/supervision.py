"""Supervision of one worker until the whole job has an outcome.

Tasks agree through these rendezvous keys, which keep their first value:

- ``outcome``: the report of the first failing rank, or empty once all ranks have returned;
- ``finished/<rank>``: the size of the result of a rank whose worker has ended;
- ``left/<rank>``: set once the task of a rank has read the outcome.

So the first failure wins, every task receives it, and every task ends.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
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
from sparkhvd.task.worker.exit import Exited
from sparkhvd.task.worker.process import WorkerProcess
from sparkhvd.task.worker.spec import FnEnded, Joined, Leave, Raised, Ready, Returned

logger = logging.getLogger(__name__)

OUTCOME = "outcome"
_FINISHED, _LEFT = "finished/", "left/"
# A job may run for weeks. Events end these waits, and the loss of the server is an event.
JOB_SECONDS = 400 * 86400.0
# The time limit of one request to the rendezvous server, which responds at once unless its host is overloaded.
NOTE_SECONDS = 30.0
# How long a worker may take to end after another rank's failure: first by itself, because its collectives fail, and
# then after SIGTERM. With the time for the last output, the sum stays below 5 s, the promised limit for a failed job.
GRACE_SECONDS = 1.5
TERM_SECONDS = 1.0
# If a rank fails because another rank was lost, its task waits this long for that rank's report.
_SECONDARY_SECONDS = 4.0
# How long a worker may take to end after fn has returned, while the user's exit handlers run.
EXIT_SECONDS = 10.0
_NO_RESULT = (
    "did not deliver the result of fn within {seconds:g} s (SPARKHVD_RESULT_TIMEOUT) after fn ended: it is still "
    "pickling the result or leaving the job. Return plain data, or write large results to a Store and return their path"
)
# The interval at which a waiting task checks that its executor is alive; nothing else reports the executor's end.
_PARENT_CHECK_SECONDS = 5.0
# How long the other ranks may take to end after a failure, and the interval at which rank 0 checks for a failure.
_FAILED_SECONDS = 6.0
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Outcome:
    """The end of the job, with or without a failure."""

    failure: FailureReport | None


@dataclass(frozen=True)
class ServerLost:
    """The rendezvous server, this task's executor or the driver's host is lost."""

    why: str


@dataclass(frozen=True)
class Supervision:
    """The job as seen by the task of one rank.

    Attributes:
        rank: the number of the rank.
        host: the host of the rank.
        client: the connection to the rendezvous server.
        start_deadline: the time by which the worker must be ready.
        hosts: the hosts of all ranks, in rank order.
        parent: the process that this one must not outlive, such as the task's executor; 0 if there is none.
        report_phase: called with every new phase of the rank; must not block.
    """

    rank: int
    host: str
    client: RendezvousClient
    start_deadline: Deadline
    hosts: Sequence[str] = ()
    parent: int = 0
    report_phase: Callable[[str], None] = lambda _: None

    def is_orphaned(self) -> bool:
        return self.parent != 0 and os.getppid() != self.parent


def watch_outcome(client: RendezvousClient, events: queue.SimpleQueue[object]) -> threading.Thread:
    """Start a thread that puts the job's ``Outcome`` or ``ServerLost`` into ``events``; closing the client ends it."""

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
    """Wait until the worker has finished or the job has failed elsewhere. The worker has ended when this returns.

    Returns:
        The worker's result, or the outcome of a job that failed.

    Raises:
        LaunchError: infrastructure was lost; Spark should retry the stage.
    """
    event = _first_end(worker, job)
    if isinstance(event, Returned):
        _release_worker(worker, job)
        return event.content
    if isinstance(event, FailureReport):
        return _publish_failure(worker, job, event)
    if isinstance(event, Outcome):
        worker.wait_for_exit(GRACE_SECONDS)
        worker.close(TERM_SECONDS)
        return event
    worker.close(TERM_SECONDS)
    raise _launch_error(job, event)


def _release_worker(worker: WorkerProcess, job: Supervision) -> None:
    """Let a worker end after ``fn`` has returned. Its result counts, however its process ends."""
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
    timeout_report = FailureReport(job.rank, job.host, "was not ready to run fn in time", kind=NOT_STARTED)
    phase, fn_has_ended = STARTING, False
    while True:
        try:
            event = worker.events.get(timeout=deadline.capped(_PARENT_CHECK_SECONDS).remaining())
        except queue.Empty:
            if job.is_orphaned():
                return ServerLost("the executor of this task has ended")
            if deadline.expired():
                return timeout_report
            continue
        if isinstance(event, Ready):
            deadline = Deadline.after(JOB_SECONDS)  # fn may run for weeks
            phase = IN_FN
            job.report_phase(phase)
        if isinstance(event, Joined):
            phase = CONNECTED
            job.report_phase(phase)
        if isinstance(event, FnEnded):
            deadline = Deadline.after(event.seconds)
            timeout_report = FailureReport(job.rank, job.host, _NO_RESULT.format(seconds=event.seconds))
            fn_has_ended = True
            job.report_phase(ENDED)
        if isinstance(event, Returned | FailureReport | Outcome | ServerLost):
            return event
        if isinstance(event, Raised | Exited):
            return _failure(event, job, phase, fn_has_ended)


def _failure(event: Raised | Exited, job: Supervision, phase: str, fn_has_ended: bool) -> FailureReport:
    """Return the report of a worker's failure in ``phase``."""
    if isinstance(event, Exited):
        failure_phase = ENDED if fn_has_ended else phase
        cause = describe_exit(event.returncode)
        return FailureReport(job.rank, job.host, cause, phase=failure_phase, secondary=event.ended_by_launcher)
    failure_phase = phase if event.phase is None else event.phase
    return FailureReport(
        job.rank, job.host, event.cause, traceback=event.traceback, phase=failure_phase, secondary=event.secondary
    )


def _publish_failure(worker: WorkerProcess, job: Supervision, report: FailureReport) -> Outcome:
    """Publish the failure, unless another rank's failure caused it, and end the worker."""
    report = replace(report, stderr_tail=worker.output.stderr_tail())
    if report.secondary:
        primary = _outcome_within(worker, _SECONDARY_SECONDS)
        if primary is not None:
            worker.close(TERM_SECONDS)
            return primary
    straggler = _straggler_report(job) if report.secondary else None
    if report.traceback == "":
        worker.close(TERM_SECONDS)  # so that stderr is complete
        report = replace(report, stderr_tail=worker.output.stderr_tail())
    job.client.set(OUTCOME, (straggler or report).to_json(), Deadline.after(NOTE_SECONDS))
    if report.traceback != "":
        worker.send(Leave(GRACE_SECONDS))
        worker.wait_for_exit(GRACE_SECONDS)
        worker.close(TERM_SECONDS)
    return Outcome(FailureReport.from_json(job.client.get(OUTCOME, Deadline.after(NOTE_SECONDS))))


def _straggler_report(job: Supervision) -> FailureReport | None:
    """Return the report of the straggler that the ranks have published, if any."""
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
    """Wait without limit for the outcome of the job and return it.

    Raises:
        LaunchError: infrastructure was lost; Spark should retry the stage.
    """
    while True:
        try:
            event = events.get(timeout=_PARENT_CHECK_SECONDS)
        except queue.Empty:
            if job.is_orphaned():
                raise _launch_error(job, ServerLost("the executor of this task has ended")) from None
            continue
        if isinstance(event, Outcome):
            return event
        if isinstance(event, ServerLost):
            raise _launch_error(job, event)


def _launch_error(job: Supervision, event: ServerLost) -> LaunchError:
    return LaunchError(
        f"Rank {job.rank} on host {job.host} lost the server that coordinates the job: {event.why}. The server runs in "
        "the driver if launcher='mpi', otherwise in the first task or on the first host. See the logs there for why it "
        "was lost. Spark retries the job unless it has failed too often."
    )


def publish_outcome(client: RendezvousClient, hosts: Sequence[str], result_cap: int) -> None:
    """Wait until every rank has finished, then publish the outcome. The task of rank 0 calls this function.

    A failing rank publishes its outcome before it finishes, so the outcome published here counts only if no rank
    failed. After a failure, the wait is short, because the hosts of missing ranks may be lost.
    """
    deadline = Deadline.after(JOB_SECONDS)
    sizes: list[bytes] | None = None
    while sizes is None:
        try:
            sizes = client.get_all(_FINISHED, range(len(hosts)), deadline.capped(_POLL_SECONDS))
        except DeadlineExceededError:
            if deadline.expired():
                return
            if _has_failed(client):
                deadline = deadline.capped(_FAILED_SECONDS)
    report = size_failure([int(size) for size in sizes], hosts, result_cap)
    client.set(OUTCOME, b"" if report is None else report.to_json(), Deadline.after(NOTE_SECONDS))


def _has_failed(client: RendezvousClient) -> bool:
    try:
        client.get(OUTCOME, Deadline.after(0.0))
    except DeadlineExceededError:
        return False
    return True


def size_failure(sizes: Sequence[int], hosts: Sequence[str], cap: int) -> FailureReport | None:
    """Return the failure for results that together exceed the limit ``cap``; None if they do not."""
    if sum(sizes) <= cap:
        return None
    rank = max(range(len(sizes)), key=sizes.__getitem__)
    cause = (
        f"returned {sizes[rank]:,} bytes, and all ranks together returned {sum(sizes):,}; the driver accepts at most "
        f"{cap:,} bytes. Write large results to a Store from within fn and return their path"
    )
    return FailureReport(rank, hosts[rank], cause, kind=TOO_LARGE)


def wait_for_leave(client: RendezvousClient, size: int, seconds: float = 5.0) -> None:
    """Wait until all tasks have read the outcome, before the server closes."""
    try:
        client.get_all(_LEFT, range(size), Deadline.after(seconds))
    except DeadlineExceededError:
        missing = ", ".join(str(rank) for rank in client.missing(_LEFT, range(size)))
        logger.warning("These ranks did not confirm that they have read the job's outcome: %s.", missing)


def finished_key(rank: int) -> str:
    return f"{_FINISHED}{rank}"


def left_key(rank: int) -> str:
    return f"{_LEFT}{rank}"
