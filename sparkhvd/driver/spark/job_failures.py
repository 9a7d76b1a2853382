"""The error messages for jobs that Spark itself aborted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from sparkhvd.data.spark.executor_packages import import_failure
from sparkhvd.rpc.messages import TaskStatus

_MAX_TEXT = 4000
_UNKNOWN: Mapping[int, str] = MappingProxyType({})
_EXECUTOR = re.compile(r"ExecutorLostFailure \(executor (\S+) [^)]*\)(?: Reason: ([^\n]*))?")
_TASK = re.compile(r"because barrier task \w+\(\d+, (\d+)\)")
_ATTEMPTS = re.compile(r"maximum allowable number of times: (\d+)")
# Captures the exception at the end of a Python traceback; Spark's own lines follow it.
_RAISED = re.compile(r"Traceback [^\n]*\n(?:[ \t][^\n]*\n)+(\S[^\n]*)")
_VERSIONS = re.compile(r"The driver has (?:sparkhvd|pyspark) .*")
# Spark reports SPARK_JOB_CANCELLED for a job that was cancelled by a tag, a group, a session or in Spark's UI, and
# OPERATION_CANCELED for one that was cancelled through Spark Connect. Spark 3.5 names no condition, and no version does
# where the session was stopped.
_CANCELLED = re.compile(
    r"(?:\[(?:SPARK_JOB_CANCELLED|OPERATION_CANCELED)\] |SparkException: (?=Job \d+ cancelled ))"
    r"([^\n]*?)\.?(?: SQLSTATE: \w+)?(?:\n|$)"
)
# Errors that Spark's driver and PySpark raise while the session stops; the last one even if the job itself has ended.
_STOPPED = re.compile(
    r"(?:dagScheduler|SparkPlan\.session)\(\)\" is null|Cannot call methods on a stopped SparkContext|"
    r"'NoneType' object has no attribute '(?:sc|setCallSite|\w*LocalProperty|\w*Tag)'"
)
_TOO_FEW_SLOTS = "[SPARK-24819]"
_CRASHED = "Python worker exited unexpectedly"


def spark_failure(
    error: BaseException,
    host_of: Callable[[str], str] = lambda _: "",
    task_hosts: Mapping[int, str] = _UNKNOWN,
    tasks: Mapping[int, TaskStatus] | None = None,
) -> str:
    """Return the message for an error that Spark raised, followed by Spark's own text.

    Args:
        error: the exception of the job.
        host_of: returns the host of an executor by its id; empty if it is unknown.
        task_hosts: the hosts of the tasks of the last attempt, by index, as far as they are known.
        tasks: the last status that each task sent to the driver, by index; None if tasks cannot reach the driver.
    """
    error = _spark_error(error)
    text = str(error)
    if message := import_failure(text):
        return message
    if (versions := _VERSIONS.search(text)) is not None:
        return versions[0]
    if has_ended(error):
        return (
            f"Spark has ended: the JVM of this driver no longer responds ({text.strip() or 'no response'}). It was "
            "stopped, it crashed, or it was killed, for example by the kernel on a host that ran out of memory. Stop "
            "the session with spark.stop(), create a new one, and run the job again."
        )
    text = "\n".join(line for line in text.splitlines() if line.strip() and not line.startswith("\tat "))
    shortened = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."
    cause = _cause(text, host_of, task_hosts, tasks)
    if not cause:
        return f"Spark aborted the job, and no rank reported a failure. Spark's own error: {shortened}"
    attempts = _ATTEMPTS.search(text)
    last = f" This was the last of {attempts[1]} attempts." if attempts else ""
    return f"Spark aborted the job: {cause}.{last}\n\nSpark's own error: {shortened}"


def has_ended(error: BaseException) -> bool:
    """Return whether the JVM of the session has ended."""
    return isinstance(error, ConnectionError | EOFError) or type(error).__name__ == "Py4JNetworkError"


def is_cancelled(error: BaseException) -> bool:
    """Return whether the job was cancelled: by a tag, a group or a session, in Spark's UI, or by stopping Spark."""
    text = str(_spark_error(error))
    return _CANCELLED.search(text) is not None or _STOPPED.search(text) is not None


def _spark_error(error: BaseException) -> BaseException:
    """Return Spark's own error. On a stopped session, PySpark's handling of that error raises an ``AttributeError``."""
    while isinstance(error, AttributeError) and error.__context__ is not None:
        error = error.__context__
    return error


def _cause(
    text: str, host_of: Callable[[str], str], task_hosts: Mapping[int, str], tasks: Mapping[int, TaskStatus] | None
) -> str:
    """Return why the last attempt failed; empty if Spark's message is unknown."""
    if _TOO_FEW_SLOTS in text:
        return (
            "the cluster has fewer slots than this job has ranks, given the cores and GPUs that each rank requests. "
            "Lower num_proc, or request less per rank"
        )
    if (cancelled := _CANCELLED.search(text)) or _STOPPED.search(text):
        return f"it was cancelled ({cancelled[1] if cancelled else 'the Spark session was stopped'})"
    match = _TASK.search(text)
    index = None if match is None else int(match[1])
    task = "a task" if index is None else f"task {index}"
    on_host = f" on host {task_hosts[index]}" if index is not None and index in task_hosts else ""
    progress = "" if index is None or tasks is None else _progress(index, tasks)
    if lost := _EXECUTOR.search(text):
        host = host_of(lost[1])
        executor = f"executor {lost[1]} on host {host}" if host else f"executor {lost[1]}"
        reason = (lost[2] or "no reason given").rstrip(".")
        return f"{executor}, which ran {task}{progress}, was lost ({reason}). See the executor's log"
    if raised := _RAISED.findall(text):  # the last exception of a chain
        return f"{task}{on_host}{progress} failed with {raised[-1].rstrip('.')}"
    if _CRASHED in text:
        why = "for example because the host ran out of memory"
        return f"the Python worker of {task}{on_host}{progress} was killed or crashed, {why}"
    return ""


def _progress(index: int, tasks: Mapping[int, TaskStatus]) -> str:
    """Return the progress of a task, in parentheses."""
    task = tasks.get(index)
    return f" (rank {task.rank}, {task.phase})" if task and task.rank >= 0 else " (before its rank was assigned)"
