"""Turns the results and failure reports of the ranks into the return value or the exception of ``run``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle

from sparkhvd.errors import LaunchError, RankFailedError, StartTimeoutError
from sparkhvd.rpc.frames import is_host_unreachable
from sparkhvd.rpc.messages import TaskStatus
from sparkhvd.rpc.server import SILENT_SECONDS, UNANSWERED_SECONDS
from sparkhvd.task.failure_report import LAUNCH, NOT_EXCHANGED, NOT_STARTED, TOO_LARGE, FailureReport
from sparkhvd.task.job import FAILURE
from sparkhvd.task.supervision import Outcome

if TYPE_CHECKING:
    from pyspark.sql import Row

# Limits the lists in messages, because a job may have thousands of tasks.
_MAX_LISTED = 10


def results_of(rows: Sequence[Row], num_proc: int) -> list[bytes]:
    """Return the pickled results in rank order, assembled from their chunks.

    Raises:
        RankFailedError: one of the rows reports a failure.
        LaunchError: a rank's result is missing.
    """
    for row in rows:
        if row.kind == FAILURE:
            raise failure_of(FailureReport.from_json(bytes(row.content)))
    contents: dict[int, list[bytes]] = {}
    for row in sorted(rows, key=lambda row: (row.rank, row.chunk)):
        contents.setdefault(row.rank, []).append(bytes(row.content))
    missing = sorted(set(range(num_proc)) - set(contents))
    if missing:
        raise LaunchError(f"Spark returned no result from ranks {missing}. See the executors' logs.")
    return [b"".join(contents[rank]) for rank in range(num_proc)]


def results_in_order(contents: Mapping[int, bytes | Outcome], num_proc: int) -> list[bytes]:
    """Return the pickled results in rank order, for ranks that were not supervised by Spark tasks.

    Raises:
        RankFailedError: a rank failed.
        LaunchError: a rank's result is missing.
    """
    for content in contents.values():
        if isinstance(content, Outcome) and content.failure is not None:
            raise failure_of(content.failure)
    results = {rank: content for rank, content in contents.items() if isinstance(content, bytes)}
    missing = sorted(set(range(num_proc)) - set(results))
    if missing:
        raise LaunchError(f"There is no result from ranks {missing}. See the output of these ranks.")
    return [results[rank] for rank in range(num_proc)]


def unpickled(contents: Sequence[bytes]) -> list[Any]:
    """Return the results, given their pickles in rank order.

    Raises:
        LaunchError: a result cannot be unpickled on the driver.
    """
    results = []
    for rank, content in enumerate(contents):
        try:
            results.append(cloudpickle.loads(content))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # unpickling runs the user's code, which may even call sys.exit
            raise LaunchError(
                f"fn succeeded on all ranks, but the driver cannot unpickle the result of rank {rank}: "
                f"{type(error).__name__}: {str(error).rstrip('.')}. Return plain values, such as numbers, strings "
                "and arrays, or make sure that the classes of the result can be imported and unpickled on the driver."
            ) from error
    return results


def failure_of(report: FailureReport, note: str = "") -> LaunchError:
    """Return the exception for a failure report; ``note`` follows its sentence."""
    message = f"{report.sentence().removesuffix('.')}. {note}".rstrip()
    if report.traceback:
        message += f"\n\nTraceback of rank {report.rank}:\n{report.traceback}"
    elif report.stderr_tail:
        message += f"\n\nThe last lines that rank {report.rank} wrote to stderr:\n{report.stderr_tail}"
    if report.kind == NOT_STARTED:
        return StartTimeoutError(f"{message} Raise start_timeout, or check what its imports wait for.")
    if report.kind == NOT_EXCHANGED:
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


def lost_task(task: TaskStatus, error: OSError) -> FailureReport:
    """Return the report for a task whose connection broke with an error."""
    return unreachable_host(task) if is_host_unreachable(error) else unresponsive_task(task)


def tasks_not_ready(
    missing: Sequence[int], hosts: Mapping[int, str], seconds: float, with_rows: bool = False
) -> FailureReport:
    """Return the report for missing tasks, for which the other tasks wait.

    Args:
        missing: the indices of the missing tasks.
        hosts: hosts of the tasks that Spark runs, by index, as far as they are known.
        seconds: the user's ``start_timeout``.
        with_rows: whether the tasks receive rows. If so, the time starts when the other tasks have received their rows.
    """
    run = _listed([f"task {index} on host {hosts[index]}" for index in missing if hosts.get(index)])
    unknown = _listed([f"task {index}" for index in missing if not hosts.get(index)])
    causes = []
    if run:
        causes.append(
            f"Spark runs {run}, but without progress. The Python worker is suspended, it hangs at the start (such as "
            "in an import from a file system that does not respond), or the host is cut off from the network. See the "
            "executor's log, or raise start_timeout"
        )
    if unknown:
        causes.append(
            f"Spark does not report where it runs {unknown}. A task waits for a slot because an executor was lost, its "
            "Python worker is suspended or hangs, or its host is cut off from the network. See the stage in Spark's UI "
            "and the log of its executor, or raise start_timeout"
        )
    since = " after the other tasks had received their rows" if with_rows else ""
    cause = f"Not all tasks of this job were ready within start_timeout={seconds:g} s{since}: {'. '.join(causes)}"
    return FailureReport(-1, "", cause, kind=NOT_EXCHANGED)


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - _MAX_LISTED} more"] if len(names) > _MAX_LISTED else []
    return ", ".join([*names[:_MAX_LISTED], *more])


def unresponsive_task(task: TaskStatus) -> FailureReport:
    """Return the report for a task that sends no heartbeats."""
    why = (
        f"has sent no heartbeat for {SILENT_SECONDS:g} s. The task's Python worker is suspended (by a signal, a "
        "debugger, or with its container), or the host is too busy to run it"
    )
    if task.rank >= 0:
        return FailureReport(task.rank, task.host, f"stopped responding ({task.phase}): its Spark task {why}")
    cause = f"Task {task.task_index} on host {task.host} stopped responding before its rank was assigned: it {why}"
    return FailureReport(-1, task.host, cause, kind=LAUNCH)


def unreachable_host(task: TaskStatus) -> FailureReport:
    """Return the report for a task whose host cannot be reached any more."""
    why = (
        f"the host has not responded for {UNANSWERED_SECONDS:g} s. Check that it is running, and the network between "
        "it and the driver"
    )
    if task.rank >= 0:
        return FailureReport(task.rank, task.host, f"was cut off from the network ({task.phase}): {why}")
    cause = (
        f"Task {task.task_index} on host {task.host} was cut off from the network before its rank was assigned: {why}"
    )
    return FailureReport(-1, task.host, cause, kind=LAUNCH)
