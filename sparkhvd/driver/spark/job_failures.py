"""What to tell when Spark itself gave a job up."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from sparkhvd.rpc.messages import TaskStatus

_MAX_TEXT = 4000
_UNKNOWN: Mapping[int, str] = MappingProxyType({})
_EXECUTOR = re.compile(r"ExecutorLostFailure \(executor (\S+) [^)]*\)(?: Reason: ([^\n]*))?")
_TASK = re.compile(r"because barrier task \w+\(\d+, (\d+)\)")
_ATTEMPTS = re.compile(r"maximum allowable number of times: (\d+)")
# The line after the traceback; what follows is Spark's.
_RAISED = re.compile(r"Traceback [^\n]*\n(?:[ \t][^\n]*\n)+(\S[^\n]*)")
_VERSIONS = re.compile(r"The driver has sparkhvd .*")
# By a tag, a group, a session or in Spark's UI; through Spark Connect the second.
_CANCELLED = re.compile(r"\[(?:SPARK_JOB_CANCELLED|OPERATION_CANCELED)\] ([^\n]*?)\.?(?: SQLSTATE: \w+)?(?:\n|$)")
_TOO_FEW_SLOTS = "[SPARK-24819]"
_CRASHED = "Python worker exited unexpectedly"


def spark_failure(
    error: BaseException,
    host_of: Callable[[str], str] = lambda _: "",
    task_hosts: Mapping[int, str] = _UNKNOWN,
    tasks: Mapping[int, TaskStatus] | None = None,
) -> str:
    """The sentences for an error of Spark, with what it said itself behind them.

    Args:
        error: what its job raised.
        host_of: the host of an executor, by its number; empty where that is not known.
        task_hosts: the hosts of the tasks of the last attempt, by index, where they are known.
        tasks: the last that these have said to the driver, by index; None where they say nothing to it.
    """
    text = str(error)
    if re.search(r"No module named 'sparkhvd['.]", text):
        return (
            "The executors cannot import sparkhvd, or not this version; install it on every node, in the Python that "
            "PYSPARK_PYTHON or spark.pyspark.python names."
        )
    if (versions := _VERSIONS.search(text)) is not None:
        return versions[0]
    if _has_ended(error):
        return (
            f"Spark has ended: the JVM beside this driver does not answer any more ({text.strip() or 'no answer'}). "
            "It was stopped or killed, as the kernel does on a host that is short of memory, or it crashed. Stop the "
            "session with spark.stop(), make a new one, and run the job again."
        )
    text = "\n".join(line for line in text.splitlines() if line.strip() and not line.startswith("\tat "))
    shortened = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."
    cause = _cause(text, host_of, task_hosts, tasks)
    if not cause:
        return f"Spark gave the job up; no rank reported a failure of its own. Spark says: {shortened}"
    attempts = _ATTEMPTS.search(text)
    last = f" It was the last of {attempts[1]} attempts." if attempts else ""
    return f"Spark gave the job up: {cause}.{last}\n\nSpark says: {shortened}"


def _has_ended(error: BaseException) -> bool:
    """Whether there is no JVM behind the session any more."""
    return isinstance(error, ConnectionError | EOFError) or type(error).__name__ == "Py4JNetworkError"


def _cause(
    text: str, host_of: Callable[[str], str], task_hosts: Mapping[int, str], tasks: Mapping[int, TaskStatus] | None
) -> str:
    """Why the last attempt failed; empty where that is not among what is known of Spark."""
    if _TOO_FEW_SLOTS in text:
        return (
            "the cluster has fewer slots than this job has ranks, with the cores and GPUs that each of them asks for. "
            "Give a smaller num_proc, or ask for less per rank"
        )
    if cancelled := _CANCELLED.search(text):
        return f"it was cancelled ({cancelled[1]})"
    number = _TASK.search(text)
    task = f"task {number[1]}" if number else "a task"
    there = f" on host {task_hosts[int(number[1])]}" if number and int(number[1]) in task_hosts else ""
    so_far = _so_far(int(number[1]), tasks) if number and tasks is not None else ""
    if lost := _EXECUTOR.search(text):
        host = host_of(lost[1])
        place = f"executor {lost[1]} on host {host}" if host else f"executor {lost[1]}"
        reason = (lost[2] or "no reason given").rstrip(".")
        return f"{place}, which ran {task}{so_far}, was lost ({reason}). Its log says more"
    if raised := _RAISED.findall(text):  # the last of those that caused each other
        return f"{task}{there}{so_far} failed with {raised[-1].rstrip('.')}"
    if _CRASHED in text:
        why = "on a host that is short of memory the kernel kills it"
        return f"the Python worker of {task}{there}{so_far} was killed or crashed; {why}"
    return ""


def _so_far(index: int, tasks: Mapping[int, TaskStatus]) -> str:
    """How far a task was, in brackets."""
    task = tasks.get(index)
    return f" (rank {task.rank}, {task.phase})" if task and task.rank >= 0 else " (before its rank was assigned)"
