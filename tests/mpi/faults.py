"""Faults of the mpi launcher that the fault matrix lacks: faults in Open MPI's programs, agents and tasks.

``test_mpi_launcher.py`` injects every fault; ``bench.soak`` reports the times.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil

from sparkhvd.errors import LaunchError
from sparkhvd.task.failure_report import CONNECTED, ENDED
from tests.launch.faults import SLOWNESS, left_of
from tests.mpi.rank_functions import stay
from tests.mpi.tasks import Launched
from tests.waiting import happens, wait_for

# Limit from the fault until the error is raised and all processes have ended.
SECONDS = 10.0 * SLOWNESS
_LEFT_SECONDS = 30.0


@dataclass(frozen=True)
class MpiFault:
    """One row of the table.

    Attributes:
        how: the fault.
        words: the beginning of the driver's error, as a regular expression.
        options: returns the job's options for a folder, and ``path``, the driver's own PATH.
        loss: kills a process of the job; None if the job is faulty from its start, from which the time then counts.
        phase: the phase of the job at the loss.
        seconds: limit from the fault until the error is raised and all processes have ended.
    """

    how: str
    words: str
    options: Callable[[Path], dict[str, object]] = lambda _: {}
    loss: Callable[[Launched], None] | None = None
    phase: str = "while the ranks run"
    seconds: float = SECONDS

    @property
    def name(self) -> str:
        return f"{self.how}, {self.phase if self.loss else 'from the start'}, mpi"


@dataclass(frozen=True)
class MpiEnded:
    """The outcome of a row.

    Attributes:
        error: the exception that the driver raised.
        seconds: from the fault until all processes had ended, including the error.
        left: processes that had not ended.
    """

    error: Exception | None
    seconds: float
    left: list[str]


def _script(folder: Path, name: str, *lines: str) -> Path:
    script = folder / name
    script.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    script.chmod(0o755)
    return script


def _without_mpirun(folder: Path) -> dict[str, object]:
    return {"path": str(folder)}


def _other_mpirun(folder: Path) -> dict[str, object]:
    _script(folder, "mpirun", "echo HYDRA build details")
    return {"path": str(folder)}


def _next_mpirun(folder: Path) -> dict[str, object]:
    _script(folder, "mpirun", "echo 'mpirun (Open MPI) 5.0.6'")
    return {"path": str(folder)}


def _without_orted(folder: Path) -> dict[str, object]:
    return {"environments": {1: {"PATH": str(folder)}}}


def _broken_orted(folder: Path) -> dict[str, object]:
    _script(folder, "orted", "echo cannot open shared object file", "exit 7")
    return {"environments": {1: {"PATH": f"{folder}:{os.environ['PATH']}"}}}


def _broken_agent(folder: Path) -> dict[str, object]:
    return {"extra": ["-mca", "plm_rsh_agent", str(_script(folder, "agent", "echo no way to $1 >&2", "exit 9"))]}


def _slow_agent(folder: Path) -> dict[str, object]:
    agent = _script(folder, "agent", f"touch {folder}/called", "exec sleep 600")
    return {"extra": ["-mca", "plm_rsh_agent", str(agent)]}


def _by_node(_: Path) -> dict[str, object]:
    """Return options with which the second task of the first host gets the last rank."""
    return {"containers": ("a", "a", "b"), "extra": ["--map-by", "node"]}


def _kill_task(launched: Launched) -> None:
    launched.stage.processes[1].kill()


def _kill_tasks(launched: Launched) -> None:
    """Kill all tasks: after the loss of one task, Spark would restart both and finally abort the job."""
    for process in launched.stage.processes:
        process.kill()


def _kill_below(words: str) -> Callable[[Launched], None]:
    def kill(_: Launched) -> None:
        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # the process has ended meanwhile
                if one.name() == words or words in one.cmdline():
                    one.kill()
                    return
        raise AssertionError(f"no process is called {words}")

    return kill


_PHASES = {"while the ranks run": CONNECTED, "at the end": ENDED}
_LOST = r"Task 1 on host 127\.0\.0\.1, the task of rank {}, was lost \({}\): its Python worker"
MPI_FAULTS = [
    MpiFault("mpirun missing", r"mpirun was not found on the driver's PATH.*launcher='barrier'", _without_mpirun),
    MpiFault("mpirun of another MPI", r"\S+/mpirun is not Open MPI's: --version prints 'HYDRA", _other_mpirun),
    MpiFault(
        "mpirun of Open MPI 5",
        r"\S+/mpirun belongs to Open MPI 5\.0\.6, which starts hosts with prted\..*launcher='barrier'",
        _next_mpirun,
    ),
    MpiFault(
        "ranks on the wrong host",
        r"mpirun started 2 of 2 ranks on host 127\.0\.0\.1, where Spark runs 1 of this job's 2 tasks",
        lambda _: {"extra": ["-H", "sparkhvd-a:1", "--map-by", "slot:OVERSUBSCRIBE"]},
    ),
    MpiFault(
        "orted missing",
        r"There is no orted on the PATH of the executors on 127\.0\.0\.1\. Install Open MPI",
        _without_orted,
    ),
    MpiFault(
        "orted fails",
        r"mpirun ended with exit code \d+\. Its last output:[\s\S]*cannot open shared object file",
        _broken_orted,
    ),
    MpiFault(
        "agent fails", r"mpirun ended with exit code \d+\. Its last output:[\s\S]*no way to sparkhvd-", _broken_agent
    ),
    MpiFault(
        "agent killed",
        r"mpirun ended with exit code \d+\. Its last output:[\s\S]*start one or more daemons",
        loss=_kill_below("sparkhvd.driver.mpi.remote_shell"),
    ),
    MpiFault("mpirun killed", r"mpirun was killed by signal 9 \(SIGKILL\)", loss=_kill_below("mpirun")),
    MpiFault("task killed", "Spark aborted the job", loss=_kill_tasks, phase="before registration"),
    MpiFault("task killed", _LOST.format(1, "before fn started"), _slow_agent, _kill_task, "while orted starts"),
    MpiFault("task killed", _LOST.format(2, r"in fn, after init\(\)"), _by_node, _kill_task),
    MpiFault("task killed", _LOST.format(1, "after fn ended"), loss=_kill_task, phase="at the end"),
]


def inject(fault: MpiFault, folder: Path) -> MpiEnded:
    """Run a job in which the fault happens, with processes instead of Spark tasks."""
    options = fault.options(folder)
    path = str(options.pop("path", os.environ["PATH"]))
    error: Exception | None = None
    began = time.monotonic()
    try:
        with mock.patch.dict(os.environ, PATH=path):
            launched = Launched(stay, folder, fault.phase, env={"FAULT_FOLDER": str(folder)}, **options)
        with closing(launched.handle):
            if fault.loss is not None:
                _await(fault.phase, folder, launched)
                began = time.monotonic()
                fault.loss(launched)
            launched.handle.results()
    except LaunchError as raised:
        error = raised
    happens(lambda: not left_of(folder), _LEFT_SECONDS)
    return MpiEnded(error, time.monotonic() - began, left_of(folder))


def _await(phase: str, folder: Path, launched: Launched) -> None:
    if phase == "while orted starts":
        wait_for((folder / "called").exists)
    elif phase != "before registration":
        ranks = len(launched.stage.processes)
        wait_for(lambda: len(list(folder.glob("pid-*"))) == ranks)
        # The driver learns the phase a moment later; until then, its error about a kill would name the earlier phase.
        wait_for(lambda: launched.phases() == [_PHASES[phase]] * ranks)


def complaints(fault: MpiFault, ended: MpiEnded) -> list[str]:
    """Return the differences between a row's outcome and its expectation."""
    found = []
    if ended.error is None or not re.match(fault.words, str(ended.error)):
        found.append(f"{type(ended.error).__name__}: {ended.error}")
    if not ended.seconds < fault.seconds:
        found.append(f"all had ended after {ended.seconds:.1f} s only")
    if ended.left:
        found.append(f"processes {ended.left} were left")
    return found
