"""The fault matrix: fault, launcher and phase, with the error that the driver must report.

``inject`` runs a row, and ``complaints`` checks its outcome. ``test_faults.py`` runs the rows that are ``always`` run;
``bench.soak`` runs all rows and reports the time to each error.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd.errors import LaunchError, RankFailedError, StartTimeoutError
from tests.launch.misbehaviour import barrier_task, go_wrong, mpi_task, train
from tests.launch.strangers import calls_of_strangers
from tests.scripts import results_of, run_script
from tests.waiting import happens

PHASES = ("before registration", "at rendezvous", "in mid-training", "at the end")
WITH_ROWS = "while its rows come"
LAUNCHERS = ("local", "barrier", "mpi")
NUM_PROC = 2


def _slowness() -> float:
    """Return the factor by which this machine's other load slows everything down, from 1 (none) to 3."""
    return min(3.0, max(1.0, os.getloadavg()[1] / (os.cpu_count() or 1)))


# The limits hold unchanged on an idle machine; the endurance run sets 1.
SLOWNESS = float(os.environ.get("SPARKHVD_TEST_SLOWNESS") or _slowness())
# Limit from the fault to the error.
SECONDS = 15.0 * SLOWNESS
# Timeout for a hanging rank.
_START_SECONDS = 6.0
_LONG = 300.0
# Limit until everything has ended on a host that was cut off: a task there looks for its driver and the other tasks.
_CUT_OFF_SECONDS = 40.0
_COMING_SECONDS = 15.0  # for tasks on several hosts, which start at different speeds
_BOUNDED = {"hang": _START_SECONDS, "task stopped": _START_SECONDS, "host cut off": _COMING_SECONDS}
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """One row of the matrix.

    Attributes:
        how: the fault.
        phase: the phase in which it happens.
        launcher: the launcher of the ranks; with ``mpi``, Open MPI sees each rank on a separate host. ``elastic`` is an
            elastic job on Spark.
        error: the exception that the driver raises; None if the job must continue.
        words: its message, as a regular expression.
        always: whether every run of the tests injects the fault.
        seconds: limit from the fault to the end of the job, on an idle machine.
        rank: the faulty rank.
        rows: whether the tasks receive rows.
    """

    how: str
    phase: str
    launcher: str
    error: type[BaseException] | None
    words: str
    always: bool = False
    seconds: float = SECONDS
    rank: int = 1
    rows: bool = False

    @property
    def name(self) -> str:
        how = self.how if self.rank == 1 else f"{self.how} (rank {self.rank})"
        return f"{how}, {self.phase}, {self.launcher}{', given rows' if self.rows else ''}"


@dataclass(frozen=True)
class Ended:
    """The outcome of a row: the error, seconds from the fault to the error or the end of the job, and leftovers."""

    error: BaseException | None
    seconds: float
    left: list[str]
    admitted: int = 0


_NAMED = r"Rank 1 on host \S+ "
_IMPORTING = r"Rank \d on host \S+ ended with exit code 1 \(before fn started\)[\s\S]*"
_NO_SPACE = r"\[Errno 28\] No space left"
_UNPACKED = "returned a BadResult that cannot be pickled"
# In fn, while modules are imported, while the result is packed.
_SAID = {
    "raise": ("raised ValueError: no luck", "ValueError: no luck", f"{_UNPACKED}: no luck"),
    "exit": ("ended with exit code 3",) * 3,
    "kill": (r"was killed by signal 9 \(SIGKILL\)",) * 3,
    "memory": ("raised MemoryError", "MemoryError", _UNPACKED),
    "disk": (f"raised OSError: {_NO_SPACE}", _NO_SPACE, f"{_UNPACKED}: {_NO_SPACE}"),
}
# The progress of the rank, as messages report it.
WHEN = {
    "before registration": "before fn started",
    "at rendezvous": "in fn",
    "in mid-training": r"in fn, after init\(\)",
    "at the end": "after fn ended",
}
_HANGING: dict[str, tuple[type[Exception], str]] = {
    "before registration": (StartTimeoutError, r"Rank \d on host \S+ was not ready to run fn in time"),
    "at rendezvous": (
        RankFailedError,
        _NAMED + r"did not reach init\(\): rank 0 waited start_timeout=6 s for rank 1 to reach init\(\)",
    ),
    "in mid-training": (
        RankFailedError,
        _NAMED + r"held up the other ranks \(in fn, after init\(\)\): barrier 'step \d' not done after [^\n]*: not "
        r"submitted by rank 1, while rank 0 waited, until [A-Z_]+=2 ended the job\.\n\nTraceback of rank 1:\n"
        r"[\s\S]* in go_wrong",
    ),
    "at the end": (
        RankFailedError,
        _NAMED + r"did not deliver the result of fn within 2 s[\s\S]*The last lines [\s\S]* in __reduce__",
    ),
}
_WRONG_SECRET = _NAMED + "raised AuthenticationError: "
_STOPPED = _NAMED + r"stopped responding \({}\): its Spark task has sent no heartbeat"
_GIVEN_UP = r"Spark aborted the job[\s\S]*"
_TASK_FAILED = r"Spark aborted the job: task 1 on host \S+ \(before its rank was assigned\) failed with [^\n]*"
_CRASHED = (
    r"Spark aborted the job: the Python worker of task 1 on host \S+ \(before its rank was assigned\) was killed or "
    "crashed"
)
_NOT_MET = r"Not all tasks of this job were ready within start_timeout=6 s{}: Spark runs task 1 on host \S+, but"
_NOT_MET, _NOT_MET_WITH_ROWS = _NOT_MET.format(""), _NOT_MET.format(" after the other tasks had received their rows")
_SILENT_WITH_ROWS = (
    r"Task 1 on host \S+ stopped responding before its rank was assigned: it has sent no heartbeat for 6 s"
)
_TASKS_OF_MPI: dict[str, tuple[type[BaseException] | None, str]] = {
    "raise": (LaunchError, f"{_TASK_FAILED}ValueError: no luck"),
    "exit": (LaunchError, _CRASHED),
    "kill": (LaunchError, _CRASHED),
    "memory": (LaunchError, f"{_TASK_FAILED}MemoryError"),
    "disk": (LaunchError, f"{_TASK_FAILED}{_NO_SPACE}"),
    "hang": (StartTimeoutError, _NOT_MET),
    "task stopped": (StartTimeoutError, _NOT_MET),
    "stranger": (None, ""),
    "driver interrupted": (KeyboardInterrupt, ""),
    "wrong secret": (
        LaunchError,
        _GIVEN_UP + r"Task 1 on host \S+ cannot register with the driver: .*both sides need the same token",
    ),
}
_TASKS = {
    "sparkhvd.driver.launchers.barrier.run_task": barrier_task,
    "sparkhvd.driver.launchers.mpi.run_mpi_task": mpi_task,
}
_PORTS: dict[str, tuple[type[Exception] | None, str]] = {
    "at rendezvous": (RankFailedError, _NAMED + "raised CollectiveError: .*(Cannot assign requested a|A)ddress"),
    "in mid-training": (None, ""),
    "at the end": (None, ""),
    "before registration": (LaunchError, r"The driver on host \S+ cannot serve the job: .*Address already in use"),
}
# One row for each way through our code; other tests cause the same faults of the other launchers.
_ALWAYS = {
    *(("local", how, phase) for how, phase in (("kill", PHASES[0]), ("kill", PHASES[2]), ("raise", PHASES[3]))),
    *(("local", "hang", phase) for phase in PHASES[2:]),
    ("local", "wrong secret", "at rendezvous"),
    *(("barrier", "kill", phase) for phase in ("before registration", "at the end")),
    *(("barrier", "task stopped", phase) for phase in ("before registration", "in mid-training")),
    *(("barrier", how, "in mid-training") for how in ("stranger", "driver interrupted")),
    *(("mpi", how, phase) for how, phase in (("kill", "at rendezvous"), ("task stopped", "in mid-training"))),
    *(("mpi", how, "before registration") for how in ("raise", "kill", "wrong secret")),
}


def _rows() -> list[Fault]:
    rows = []
    for launcher in LAUNCHERS:
        for phase in PHASES:
            for how, (message, importing, packing) in _SAID.items():
                words = _NAMED + (packing if phase == "at the end" else message)
                if phase == "before registration":
                    of_any = rf"Rank \d on host \S+ {message}"
                    words = of_any if how in {"exit", "kill"} else _IMPORTING + importing
                if words[: len(_IMPORTING)] != _IMPORTING:
                    words += rf"[^\n]* \({WHEN[phase]}\)"
                rows.append(_row(how, phase, launcher, RankFailedError, words))
            rows.append(_row("hang", phase, launcher, *_HANGING[phase]))
            rows.append(_row("stranger", phase, launcher, None, ""))
            rows.append(_row("driver interrupted", phase, launcher, KeyboardInterrupt, ""))
        rows.append(_row("wrong secret", "at rendezvous", launcher, RankFailedError, _WRONG_SECRET))
        if launcher != "local":
            rows += [
                _row("task stopped", phase, launcher, RankFailedError, _STOPPED.format(WHEN[phase]))
                for phase in PHASES[1:]
            ]
    # Open MPI starts no rank whose Python fails before it registers. In that phase the task is faulty instead.
    rows = [row for row in rows if (row.launcher, row.phase) != ("mpi", "before registration")]
    rows += [_row(how, "before registration", "mpi", *expected) for how, expected in _TASKS_OF_MPI.items()]
    # Such a task has no link to the driver and works without one, until it must prove to another task that it knows
    # the secret. After that failure, Spark does not know that the next attempt will fail, too.
    words = f"{_GIVEN_UP}AuthenticationError: no rendezvous server answered"
    stopped = _row("task stopped", "before registration", "barrier", StartTimeoutError, _NOT_MET)
    again = Fault("wrong secret", "before registration", "barrier", LaunchError, words, False, seconds=2 * SECONDS)
    with_rows = [
        Fault("task stopped", phase, "barrier", error, words, True, rows=True)
        for phase, error, words in (
            (PHASES[0], StartTimeoutError, _NOT_MET_WITH_ROWS),
            (WITH_ROWS, LaunchError, _SILENT_WITH_ROWS),
        )
    ]
    elastic = _row("driver interrupted", PHASES[2], "elastic", KeyboardInterrupt, "")  # others: ``elastic_faults``
    return [*rows, stopped, again, *with_rows, elastic]


def _row(how: str, phase: str, launcher: str, error: type[BaseException] | None, words: str) -> Fault:
    return Fault(how, phase, launcher, error, words, (launcher, how, phase) in _ALWAYS)


FAULTS = _rows()
# The tests of the ray launcher run these on their own cluster; losses of actors, nodes and the driver are there, too.
RAY_FAULTS = [
    *(
        _row(how, PHASES[2], "ray", RankFailedError, rf"{_NAMED}{_SAID[how][0]}[^\n]* \({WHEN[PHASES[2]]}\)")
        for how in ("raise", "exit", "kill")
    ),
    _row("hang", PHASES[2], "ray", *_HANGING[PHASES[2]]),
    _row("driver interrupted", PHASES[2], "ray", KeyboardInterrupt, ""),
]
# No launcher asks for a fixed port, so this fault takes all ports; it runs where it disturbs no other process.
PORT_FAULTS = [
    Fault("port taken", phase, launcher, *expected, always=launcher == "local" and phase != "at the end")
    for launcher in LAUNCHERS
    for phase, expected in _PORTS.items()
]
_CUT_OFF_EARLY = (
    r"Not all tasks of this job were ready within start_timeout=15 s: Spark runs [\s\S]*task 1 on host \S+, "
)
# Keepalive drops a silent host after 9 s; Spark alone takes two minutes.
_CUT_SECONDS = 9.0 + SECONDS / 2
_CUT_OFF = r"Rank {} on host \S+ was cut off from the network \({}\): the host has not responded for 9 s"
# These need separate hosts. No process is connected to a task that is still missing: start_timeout ends the wait.
CUT_OFF_FAULTS = [
    row
    for launcher in LAUNCHERS[1:]
    for row in (
        *(
            Fault(
                "host cut off",
                phase,
                launcher,
                RankFailedError,
                _CUT_OFF.format(rank, WHEN[phase]),
                always,
                _CUT_SECONDS,
                rank,
            )
            for phase, rank, always in (
                (PHASES[1], 1, False),
                (PHASES[2], 1, False),
                (PHASES[2], 0, launcher == "barrier"),
                (PHASES[3], 1, False),
            )
        ),
        Fault(
            "host cut off", PHASES[0], launcher, StartTimeoutError, _CUT_OFF_EARLY, seconds=SECONDS + _COMING_SECONDS
        ),
    )
]


def inject(fault: Fault, folder: Path, spark: SparkSession | None, num_proc: int = NUM_PROC) -> Ended:
    """Run a job in which the fault happens."""
    environment = {"FAULT": fault.how, "FAULT_PHASE": fault.phase, "FAULT_FOLDER": str(folder)}
    environment["FAULT_RANK"] = str(fault.rank)
    early = fault.phase == "before registration"
    of_task = fault.launcher == "mpi" or fault.how == "host cut off"
    if fault.how == "hang":  # these limit the waits of the other ranks, which are long by default
        environment["SPARKHVD_RESULT_TIMEOUT"] = "2"
        environment |= {"SPARKHVD_STALL_CHECK_SECONDS": "1", "SPARKHVD_STALL_SHUTDOWN_SECONDS": "2"}
    bounded = early or (fault.how == "hang" and fault.phase == "at rendezvous")  # by start_timeout, like init()
    error: BaseException | None = None
    interrupts = signal.getsignal(signal.SIGINT)
    (folder / "driver").write_text(str(os.getpid()))
    if early and fault.how == "port taken":  # the driver is the first to need a port
        go_wrong(fault.how, folder)
    with ExitStack() as stack:
        for where, task in _TASKS.items():
            stack.enter_context(mock.patch(where, task))
        if fault.how == "task stopped":
            for where in ("rpc.server", "driver.launchers.mpi", "driver.results"):
                stack.enter_context(mock.patch(f"sparkhvd.{where}.SILENT_SECONDS", _START_SECONDS))
        counts = stack.enter_context(calls_of_strangers(folder))
        try:
            options: dict[str, Any] = {
                "num_proc": num_proc,
                "env": environment,
                "preload": ("tests.launch.faulty_module",) if early and not of_task else (),
                "start_timeout": _BOUNDED.get(fault.how, _LONG) if bounded else _LONG,
                "stdout": io.StringIO(),
                "stderr": io.StringIO(),
                "spark": None if fault.launcher == "local" else spark,
            }
            arguments = (fault.how, fault.phase, str(folder))
            if fault.launcher == "elastic":
                sparkhvd.run_elastic(train, arguments, min_num_proc=1, **options)
            else:
                rows = spark.range(num_proc, numPartitions=num_proc) if fault.rows and spark is not None else None
                sparkhvd.run(train, arguments, launcher=fault.launcher, rows=rows, **options)
        except (LaunchError, KeyboardInterrupt) as raised:
            error = raised
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a rank that ends late interrupts the driver again
        when = folder / "when"
        seconds = time.time() - float(when.read_text()) if when.exists() else float("nan")
    happens(lambda: not left_of(folder), _CUT_OFF_SECONDS if fault.how == "host cut off" else 10.0)
    left = left_of(folder)
    signal.signal(signal.SIGINT, interrupts)
    return Ended(error, seconds, left, counts["admitted"])


def left_of(folder: Path) -> list[str]:
    """Return the processes of the job with this folder that still run."""
    pids = [*(int(path.name.partition("-")[2]) for path in folder.glob("pid-*")), *_below()]
    mark = f"FAULT_FOLDER={folder}\0".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process has just ended
            if mark in environment.read_bytes():
                pids.append(int(environment.parent.name))
    left = []
    for pid in sorted(set(pids)):
        with suppress(psutil.Error):
            left.append(f"{pid}: {' '.join(psutil.Process(pid).cmdline())[:200]}")
    return left


def _below() -> list[int]:
    """Return the descendants that a job has besides its ranks: ``mpirun``, its agents, ``orted`` and their children."""
    pids = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if "pyspark" not in words and ("sparkhvd." in words or process.name() in {"mpirun", "orted"}):
                pids.append(process.pid)
    return pids


def ports_taken(folder: Path, *more: str) -> dict[str, tuple[float, str, list[str]]]:
    """Run ``ports_script`` in a network namespace with few ports; return seconds, error and complaints by row."""
    prepare = "ip link set lo up && sysctl -qw net.ipv4.ip_local_port_range='40000 40299' && exec \"$@\""
    command = [sys.executable, "-m", "tests.launch.ports_script", str(folder), *more]
    return results_of(run_script(["unshare", "--net", "sh", "-c", prepare, "sh", *command], folder, _LONG))


def complaints(fault: Fault, ended: Ended) -> list[str]:
    """Return the differences between a row's outcome and its expectation."""
    found = []
    if fault.error is None:
        if ended.error is not None:
            found.append(f"{type(ended.error).__name__}: {ended.error}")
    elif type(ended.error) is not fault.error or not re.match(fault.words, str(ended.error)):
        found.append(f"{type(ended.error).__name__}: {ended.error}")
    elif isinstance(ended.error, RankFailedError) and not str(ended.error).startswith(
        f"Rank {ended.error.rank} on host {ended.error.host} "
    ):
        found.append(f"the attributes are of rank {ended.error.rank} on host {ended.error.host}: {ended.error}")
    if not ended.seconds < fault.seconds:
        found.append(f"the error came after {ended.seconds:.1f} s")
    if ended.admitted:
        found.append(f"{ended.admitted} unauthenticated clients were admitted")
    if ended.left:
        found.append(f"processes {ended.left} were left")
    return found
