"""The checks that follow from the tasks' examinations, and the report of the preflight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from sparkhvd._util.counts import counted
from sparkhvd.compat.spark import release
from sparkhvd.task.host.examination import Examination

_MIB = 1 << 20
# Below this size (Docker's default is 64 MiB), SIGBUS kills workers of PyTorch's DataLoader with ordinary batches.
_SMALL_SHARED_MEMORY = 256 * _MIB


class Verdict(Enum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"
    SKIPPED = "-"


@dataclass(frozen=True)
class Check:
    """A check, its verdict, and its message: the finding and, for a problem, the remedy."""

    name: str
    verdict: Verdict
    says: str


@dataclass(frozen=True)
class PreflightReport:
    """The findings of ``preflight``; as a string, the table that it prints.

    Attributes:
        checks: the checks and their verdicts.
        tasks: the examination of each task of the cluster.
        driver: versions on the driver.
        seconds: duration of the preflight.
    """

    checks: tuple[Check, ...]
    tasks: tuple[Examination, ...]
    driver: Mapping[str, str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Return whether no check found a problem that would prevent a job from running."""
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """Return the problems that would prevent a job from running, each with its remedy."""
        return tuple(check.says for check in self.checks if check.verdict is Verdict.FAIL)

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [f"{check.verdict.value:<5} {check.name:<{width}}  {check.says}" for check in self.checks]
        verdict = "ready" if self.ok else counted(len(self.problems), "problem")
        title = f"sparkhvd preflight: {verdict} ({self.seconds:.1f} s)"
        return "\n".join([title, "", *task_table(self.tasks, self.driver), "", *lines])


def task_table(tasks: Sequence[Examination], driver: Mapping[str, str]) -> list[str]:
    """Return the lines of a table with a row for the driver and one for each task."""
    names = list(dict.fromkeys(name for versions in [driver, *(task.versions for task in tasks)] for name in versions))
    header = ["task", "host", "cores", "GPU", "shared memory", "orted", *names]
    rows = [["", "(driver)", "", "", "", "", *(driver.get(name, "-") for name in names)]]
    for task in tasks:
        gpu = " ".join(part for part in (",".join(task.devices), task.device_kind) if part) or "-"
        machine = [str(task.task_index), task.host, str(task.cpus), gpu, f"{task.shared_memory // _MIB} MiB"]
        rows.append([*machine, "yes" if task.orted else "no", *(task.versions.get(name, "-") for name in names)])
    widths = [max(len(line[index]) for line in [header, *rows]) for index in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, *rows]
    ]


def cluster_checks(tasks: Sequence[Examination], driver: Mapping[str, str], *, together: bool = True) -> list[Check]:
    """Return the checks that follow from the examinations of the tasks.

    Args:
        tasks: the examinations.
        driver: versions on the driver.
        together: whether the tasks ran at the same time and have tried to reach each other.
    """
    return [
        _network(tasks, together),
        _elastic(tasks),
        _devices(tasks),
        _versions(tasks, driver),
        *frameworks_check(driver),
        _shared_memory(tasks),
    ]


def _network(tasks: Sequence[Examination], together: bool) -> Check:
    hosts = len({task.host_hash for task in tasks})
    unreachable = [sentence for task in tasks for sentence in task.unreachable]
    if not unreachable and not together and hosts > 1:
        message = "the hosts have not tried to reach each other, which takes a barrier stage"
        return Check("network", Verdict.SKIPPED, message)
    if not unreachable:
        message = "all ranks are on one host" if hosts == 1 else f"all {hosts} hosts reach each other"
        return Check("network", Verdict.OK, message)
    shown = "; ".join(unreachable[:10]) + ("; ..." if len(unreachable) > 10 else "")
    return Check(
        "network",
        Verdict.FAIL,
        f"{shown}. Open all TCP ports between the hosts, or name the network that connects them with nics=.",
    )


def _elastic(tasks: Sequence[Examination]) -> Check:
    """Check what only elastic jobs need: connections from all hosts to the driver."""
    problems = {task.host: task.driver_problem for task in tasks if task.driver_problem}
    if not problems:
        return Check("elastic", Verdict.OK, "all hosts reach the driver, as elastic jobs require")
    host, problem = next(iter(problems.items()))
    return Check(
        "elastic",
        Verdict.WARN,
        f"Elastic jobs cannot use {', '.join(problems)}: {host} cannot connect to the driver: {problem}. Set "
        "spark.driver.host to an address of the driver that the executors reach, and open its TCP ports to them.",
    )


def _devices(tasks: Sequence[Examination]) -> Check:
    kinds = sorted({task.device_kind for task in tasks})
    if kinds == [""]:
        return Check("devices", Verdict.OK, "no rank has a GPU")
    if "" in kinds:
        without = sorted({task.host for task in tasks if not task.device_kind})
        return Check(
            "devices",
            Verdict.FAIL,
            f"Some ranks have a GPU, but those on {', '.join(without)} have none. Let Spark assign one to every rank "
            "(gpus_per_task=1), or hide the GPUs from all ranks (CUDA_VISIBLE_DEVICES='').",
        )
    if len(kinds) > 1:
        return Check(
            "devices",
            Verdict.WARN,
            f"The ranks have different GPUs: {'; '.join(kinds)}. The slowest GPU determines the speed of all ranks.",
        )
    if not any(task.devices for task in tasks):
        return Check(
            "devices",
            Verdict.WARN,
            f"The hosts have GPUs ({kinds[0]}), but Spark assigns none, so all ranks of a host see all of them. Start "
            "the session with spark.executor.resource.gpu.amount and set gpus_per_task=1.",
        )
    return Check("devices", Verdict.OK, f"every rank has a {kinds[0]}")


def _versions(tasks: Sequence[Examination], driver: Mapping[str, str]) -> Check:
    """Compare versions. Python, Spark and sparkhvd must match; other packages should, because models are pickled."""
    everywhere = [driver, *(task.versions for task in tasks)]
    names = sorted({name for versions in everywhere for name in versions})
    by_name = {name: sorted({versions.get(name, "none") for versions in everywhere}) for name in names}
    differing = {name: versions for name, versions in by_name.items() if len(versions) > 1}
    for name in ("python", "pyspark"):  # patch releases may differ
        if len({release(versions.get(name, "none")) for versions in everywhere}) == 1:
            differing.pop(name, None)
    if not differing:
        return Check("versions", Verdict.OK, "the same on the driver and on all hosts")
    shown = ", ".join(f"{name} {' and '.join(versions)}" for name, versions in differing.items())
    verdict = Verdict.FAIL if {"python", "pyspark", "sparkhvd"} & set(differing) else Verdict.WARN
    return Check(
        "versions", verdict, f"Versions differ: {shown}. Install the same versions on the driver and on every node."
    )


def frameworks_check(driver: Mapping[str, str]) -> list[Check]:
    """Return a warning if the driver has both TensorFlow and PyTorch; empty otherwise."""
    if not {"tensorflow", "torch"} <= driver.keys():
        return []
    message = (
        "The driver has both TensorFlow and PyTorch: a program that imports TensorFlow (or Keras with it) first can "
        "crash with a segmentation fault in PyTorch's triton. In a program that uses both, write "
        "`import torch._dynamo` before `import keras`."
    )
    return [Check("frameworks", Verdict.WARN, message)]


def _shared_memory(tasks: Sequence[Examination]) -> Check:
    smallest = min(tasks, key=lambda task: task.shared_memory)
    size = smallest.shared_memory // _MIB
    if smallest.shared_memory >= _SMALL_SHARED_MEMORY:
        return Check("shared memory", Verdict.OK, f"at least {size} MiB in /dev/shm")
    return Check(
        "shared memory",
        Verdict.WARN,
        f"Only {size} MiB in /dev/shm on host {smallest.host}. sparkhvd does not need it, but the workers of PyTorch's "
        "DataLoader do. Start the containers with more (docker run --shm-size=2g).",
    )
