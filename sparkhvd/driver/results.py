"""From what the ranks left to what ``run`` returns or raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sparkhvd.errors import LaunchError, RankFailedError, StartTimeoutError
from sparkhvd.rpc.frames import is_host_unreachable
from sparkhvd.rpc.messages import TaskStatus
from sparkhvd.rpc.server import SILENT_SECONDS
from sparkhvd.task.failure_report import LAUNCH, NOT_MET, NOT_STARTED, TOO_LARGE, FailureReport
from sparkhvd.task.job import FAILURE
from sparkhvd.task.supervision import Outcome

if TYPE_CHECKING:
    from pyspark.sql import Row

# Of thousands of tasks.
_MOST_NAMED = 10


def results_of(rows: Sequence[Row], num_proc: int) -> list[bytes]:
    """The pickled results in rank order, put together from their chunks.

    Raises:
        RankFailedError: one of the rows reports a failure.
        LaunchError: a rank's result is missing.
    """
    for row in rows:
        if row.kind == FAILURE:
            raise failure_of(FailureReport.from_json(bytes(row.content)))
    contents: dict[int, list[bytes]] = {}
    for row in sorted(rows, key=lambda one: (one.rank, one.chunk)):
        contents.setdefault(row.rank, []).append(bytes(row.content))
    missing = sorted(set(range(num_proc)) - set(contents))
    if missing:
        raise LaunchError(f"Spark returned no result of ranks {missing}.")
    return [b"".join(contents[rank]) for rank in range(num_proc)]


def results_in_order(contents: Mapping[int, bytes | Outcome], num_proc: int) -> list[bytes]:
    """The pickled results in rank order, of ranks that were not watched over by Spark tasks.

    Raises:
        RankFailedError: a rank failed.
        LaunchError: a rank's result is missing.
    """
    for content in contents.values():
        if isinstance(content, Outcome) and content.failure is not None:
            raise failure_of(content.failure)
    found = {rank: content for rank, content in contents.items() if isinstance(content, bytes)}
    missing = sorted(set(range(num_proc)) - set(found))
    if missing:
        raise LaunchError(f"There is no result of ranks {missing}.")
    return [found[rank] for rank in range(num_proc)]


def failure_of(report: FailureReport) -> LaunchError:
    """The exception that says what a report says."""
    message = f"{report.sentence().removesuffix('.')}."
    if report.traceback:
        message += f"\n\nTraceback of rank {report.rank}:\n{report.traceback}"
    elif report.stderr_tail:
        message += f"\n\nThe last lines that rank {report.rank} wrote to stderr:\n{report.stderr_tail}"
    if report.kind == NOT_STARTED:
        return StartTimeoutError(f"{message} Raise start_timeout, or see what its imports wait for.")
    if report.kind == NOT_MET:
        return StartTimeoutError(message)
    if report.kind in {TOO_LARGE, LAUNCH}:
        return LaunchError(message)
    return RankFailedError(
        message,
        rank=report.rank,
        host=report.host,
        remote_traceback=report.traceback,
        stderr_tail=report.stderr_tail,
    )


def lost(task: TaskStatus, error: OSError) -> FailureReport:
    """The report for a task whose connection broke with an error."""
    return cut_off(task) if is_host_unreachable(error) else silent(task)


def not_met(missing: Sequence[int], hosts: Mapping[int, str], seconds: float, given: bool = False) -> FailureReport:
    """The report for tasks that keep the others waiting.

    Args:
        missing: their indices.
        hosts: of tasks that Spark runs, by index, as far as they are known.
        seconds: what the user gave as ``start_timeout``.
        given: whether the tasks are given rows, so that the others have waited with theirs for so long.
    """
    run = _listed([f"task {index} on host {hosts[index]}" for index in missing if hosts.get(index)])
    unknown = _listed([f"task {index}" for index in missing if not hosts.get(index)])
    causes = []
    if run:
        causes.append(
            f"Spark runs {run}, but without getting any further. Its Python worker is stopped, what it does first "
            "hangs, like an import from a file system that does not answer, or its host is cut off from the network. "
            "See the executor's log, or raise start_timeout"
        )
    if unknown:
        causes.append(
            f"Spark does not say here where it runs {unknown}. It waits for a slot since an executor was lost, its "
            "Python worker is stopped or hangs, or its host is cut off from the network. See the stage in Spark's UI "
            "and the log of the executor there, or raise start_timeout"
        )
    since = " after the others had their rows" if given else ""
    met = f"The tasks of this job did not meet within start_timeout={seconds:g} s{since}: {'. '.join(causes)}"
    return FailureReport(-1, "", met, kind=NOT_MET)


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return ", ".join([*names[:_MOST_NAMED], *more])


def silent(task: TaskStatus) -> FailureReport:
    """The report for a task that does nothing any more."""
    why = (
        f"no sign of life for {SILENT_SECONDS:g} s. The task's Python worker is stopped (by a signal, a debugger, or "
        "with its container), or the host is too busy to run it"
    )
    if task.rank >= 0:
        return FailureReport(task.rank, task.host, f"was given up ({task.phase}): its Spark task has given {why}")
    cause = f"Task {task.task_index} on host {task.host} was given up before its rank was assigned: it has given {why}"
    return FailureReport(-1, task.host, cause, kind=LAUNCH)


def cut_off(task: TaskStatus) -> FailureReport:
    """The report for a host that does not answer any more."""
    why = "no sign of life came from it for 9 s. See whether the host runs and what is between it and the driver"
    if task.rank >= 0:
        return FailureReport(task.rank, task.host, f"was cut off from the network ({task.phase}): {why}")
    cause = (
        f"Task {task.task_index} on host {task.host} was cut off from the network before its rank was assigned: {why}"
    )
    return FailureReport(-1, task.host, cause, kind=LAUNCH)
