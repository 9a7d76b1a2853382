"""Supervision of several ranks of one host by one process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping

from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError, SparkHvdError
from sparkhvd.task.failure_report import FailureReport
from sparkhvd.task.rank import JobPlan, supervise_rank
from sparkhvd.task.supervision import NOTE_SECONDS, OUTCOME, Outcome, ServerLost, finished_key, left_key
from sparkhvd.task.worker.process import WorkerProcess


def run_ranks(
    plan: JobPlan,
    workers: Mapping[int, WorkerProcess],
    deadline: Deadline,
    parent: int | None = None,
    report_phase: Callable[[int, str], None] = lambda _rank, _phase: None,
) -> dict[int, bytes | Outcome]:
    """Supervise the workers of these ranks until the whole job has an outcome.

    Args:
        plan: the plan of the job.
        workers: the workers by rank. Each has received its spec; all have ended when this function returns.
        deadline: the time by which the workers must be ready for ``fn``.
        parent: the process that this one must not outlive, as in ``supervise_rank``.
        report_phase: called with a rank and its new phase; must not block.

    Returns:
        The pickled result of each rank, or the outcome of a job that failed, by rank.

    Raises:
        LaunchError: infrastructure was lost.
    """
    contents: dict[int, bytes | Outcome] = {}  # each thread writes its own rank's entry, and is joined before a read
    losses: list[LaunchError] = []  # the first one caused the others

    def watch(rank: int) -> None:
        try:
            contents[rank] = supervise_rank(
                plan,
                plan.slots[rank],
                workers[rank],
                deadline,
                parent=parent,
                report_phase=functools.partial(report_phase, rank),
            )
        except (SparkHvdError, OSError) as error:
            losses.append(LaunchError(f"Rank {rank} on host {plan.slots[rank].offer.host} was lost: {error}"))
            losses[-1].__cause__ = error
            workers[rank].close()
            _end_job(plan, rank, error, workers)

    threads = [threading.Thread(target=watch, args=(rank,), name=f"sparkhvd-rank-{rank}") for rank in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if losses:
        raise losses[0]
    return contents


def _end_job(plan: JobPlan, rank: int, error: Exception, workers: Mapping[int, WorkerProcess]) -> None:
    """End the job after the supervision of one rank failed, because that rank never reports an outcome."""
    deadline = Deadline.after(NOTE_SECONDS)
    report = FailureReport(rank, plan.slots[rank].offer.host, f"was lost: {error}")
    try:
        with plan.connect(deadline) as client:
            client.set(OUTCOME, report.to_json(), deadline)
            client.set(finished_key(rank), b"0", deadline)
            client.set(left_key(rank), b"", deadline)
    except (SparkHvdError, OSError) as unreachable:
        for worker in workers.values():
            worker.events.put(ServerLost(str(unreachable)))
