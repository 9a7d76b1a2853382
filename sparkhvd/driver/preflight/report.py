"""What the preflight concludes from what the tasks found, and how it says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from sparkhvd.task.host.examination import Examination

_MIB = 1 << 20
# Docker's default, below which the workers of PyTorch's DataLoader die of SIGBUS with batches of ordinary size.
_SMALL_SHARED_MEMORY = 256 * _MIB


class Verdict(Enum):
    """What comes of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"
    SKIPPED = "-"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, what came of it, and, where something is wrong, what to change."""

    name: str
    verdict: Verdict
    says: str


@dataclass(frozen=True)
class PreflightReport:
    """What ``preflight`` found; as a string, the table that it prints.

    Attributes:
        checks: what was looked at.
        tasks: what each task of the cluster found.
        driver: versions on the driver.
        seconds: how long it took.
    """

    checks: tuple[Check, ...]
    tasks: tuple[Examination, ...]
    driver: Mapping[str, str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing was found that would keep a job from running."""
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """What would keep a job from running, each with what to change."""
        return tuple(check.says for check in self.checks if check.verdict is Verdict.FAIL)

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [f"{check.verdict.value:<5} {check.name:<{width}}  {check.says}" for check in self.checks]
        verdict = "ready" if self.ok else f"{len(self.problems)} to solve"
        title = f"sparkhvd preflight: {verdict} ({self.seconds:.1f} s)"
        return "\n".join([title, "", *task_table(self.tasks, self.driver), "", *lines])


def task_table(tasks: Sequence[Examination], driver: Mapping[str, str]) -> list[str]:
    """A line per task, below one of the driver."""
    names = list(dict.fromkeys(name for one in [driver, *(task.versions for task in tasks)] for name in one))
    header = ["task", "host", "cores", "GPU", "shared memory", "orted", *names]
    rows = [["", "(driver)", "", "", "", "", *(driver.get(name, "-") for name in names)]]
    for task in tasks:
        gpu = " ".join(part for part in (",".join(task.devices), task.device_kind) if part) or "-"
        place = [str(task.task_index), task.host, str(task.cpus), gpu, f"{task.shared_memory // _MIB} MiB"]
        rows.append([*place, "yes" if task.orted else "no", *(task.versions.get(name, "-") for name in names)])
    widths = [max(len(line[index]) for line in [header, *rows]) for index in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, *rows]
    ]


def cluster_checks(tasks: Sequence[Examination], driver: Mapping[str, str]) -> list[Check]:
    """What follows from what the tasks found."""
    return [
        _network(tasks),
        _devices(tasks),
        _versions(tasks, driver),
        *frameworks_check(driver),
        _shared_memory(tasks),
    ]


def _network(tasks: Sequence[Examination]) -> Check:
    hosts = len({task.host_hash for task in tasks})
    unreachable = [sentence for task in tasks for sentence in task.unreachable]
    if not unreachable:
        what = "all ranks are on one host" if hosts == 1 else f"all {hosts} hosts reach each other"
        return Check("network", Verdict.OK, what)
    shown = "; ".join(unreachable[:10]) + ("; ..." if len(unreachable) > 10 else "")
    return Check(
        "network",
        Verdict.FAIL,
        f"{shown}. Open all TCP ports between the hosts, or name the network that connects them with nics=.",
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
            f"Some ranks have a GPU, those on {', '.join(without)} have none. Let Spark give every rank one "
            "(gpus_per_task=1), or keep all of them from using one (CUDA_VISIBLE_DEVICES='').",
        )
    if len(kinds) > 1:
        return Check(
            "devices",
            Verdict.WARN,
            f"The ranks have different GPUs: {'; '.join(kinds)}. The slowest one sets the pace of all.",
        )
    if not any(task.devices for task in tasks):
        return Check(
            "devices",
            Verdict.WARN,
            f"The hosts have GPUs ({kinds[0]}), but Spark assigns none, so all ranks of a host see all of them. Start "
            "the session with spark.executor.resource.gpu.amount and ask for gpus_per_task=1.",
        )
    return Check("devices", Verdict.OK, f"every rank has a {kinds[0]}")


def _versions(tasks: Sequence[Examination], driver: Mapping[str, str]) -> Check:
    """Python and sparkhvd have to be the same; other packages should, because models are pickled."""
    everywhere = [driver, *(task.versions for task in tasks)]
    names = sorted({name for one in everywhere for name in one})
    found = {name: sorted({one.get(name, "none") for one in everywhere}) for name in names}
    differing = {name: there for name, there in found.items() if len(there) > 1}
    minor = {one["python"].rpartition(".")[0] for one in everywhere}
    if len(minor) == 1:
        differing.pop("python", None)
    if not differing:
        return Check("versions", Verdict.OK, "the same on the driver and everywhere")
    shown = ", ".join(f"{name} {' and '.join(there)}" for name, there in differing.items())
    verdict = Verdict.FAIL if {"python", "sparkhvd"} & set(differing) else Verdict.WARN
    return Check("versions", verdict, f"There are {shown}. Install the same versions on the driver and on every node.")


def frameworks_check(driver: Mapping[str, str]) -> list[Check]:
    """A warning where the driver has both TensorFlow and PyTorch; nothing otherwise."""
    if not {"tensorflow", "torch"} <= driver.keys():
        return []
    says = (
        "The driver has both TensorFlow and PyTorch: a program that imports TensorFlow (or Keras with it) first can "
        "crash with a segmentation fault in PyTorch's triton, so write `import torch._dynamo` before `import keras` "
        "where one program uses both."
    )
    return [Check("frameworks", Verdict.WARN, says)]


def _shared_memory(tasks: Sequence[Examination]) -> Check:
    smallest = min(tasks, key=lambda task: task.shared_memory)
    size = smallest.shared_memory // _MIB
    if smallest.shared_memory >= _SMALL_SHARED_MEMORY:
        return Check("shared memory", Verdict.OK, f"{size} MiB and more in /dev/shm")
    return Check(
        "shared memory",
        Verdict.WARN,
        f"{size} MiB in /dev/shm on host {smallest.host}. sparkhvd does not need it, but the workers of PyTorch's "
        "DataLoader do; start the containers with more (docker run --shm-size=2g).",
    )
