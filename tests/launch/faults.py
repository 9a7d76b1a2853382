"""The fault matrix: what goes wrong x who starts the ranks x when, and what the driver has to say of it.

A row is produced and judged by ``produced`` and ``complaints``. ``test_faults.py`` runs those that are ``always`` to be
run; ``bench.soak`` runs all and reports the times to the error.
"""

from __future__ import annotations

import io
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import psutil
from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError, RankFailedError, StartTimeoutError
from tests.launch.misbehaviour import train
from tests.mpi.tasks import Launched

PHASES = ("before registration", "at rendezvous", "in mid-training", "at the end")
LAUNCHERS = ("local", "barrier", "mpi")
NUM_PROC = 2
# From the fault to the error, on a machine that is not busy.
SECONDS = 15.0 * float(os.environ.get("SPARKHVD_TEST_SLOWNESS", "3"))
# What a hanging rank is given.
_START_SECONDS = 6.0
_LONG = 300.0


@dataclass(frozen=True)
class Fault:
    """One row.

    Attributes:
        how: what goes wrong.
        phase: when.
        launcher: who starts the ranks; ``mpi`` uses processes in the place of Spark tasks.
        error: what the driver raises.
        words: what it says, as a regular expression.
        always: whether every run of the tests produces it.
    """

    how: str
    phase: str
    launcher: str
    error: type[Exception]
    words: str
    always: bool = False

    @property
    def name(self) -> str:
        return f"{self.how}, {self.phase}, {self.launcher}"


@dataclass(frozen=True)
class Ended:
    """What came of a row: the error, seconds from the fault to it, and the processes that were left."""

    error: Exception | None
    seconds: float
    left: list[int]


_NAMED = r"Rank 1 on host \S+ "
_IMPORTING = r"Rank \d on host \S+ ended with exit code 1 before fn returned[\s\S]*"
_NO_SPACE = r"\[Errno 28\] No space left"
_UNPACKED = "returned a BadResult that cannot be pickled"
# In fn, while modules are imported, while the result is packed.
_SAID = {
    "raise": ("raised ValueError: no luck", "ValueError: no luck", f"{_UNPACKED}: no luck"),
    "exit": ("ended with exit code 3 before fn returned",) * 3,
    "kill": (r"was killed by signal 9 \(SIGKILL\)",) * 3,
    "memory": ("raised MemoryError", "MemoryError", _UNPACKED),
    "disk": (f"raised OSError: {_NO_SPACE}", _NO_SPACE, f"{_UNPACKED}: {_NO_SPACE}"),
}
_HANGING: dict[str, tuple[type[Exception], str]] = {
    "before registration": (StartTimeoutError, r"Rank \d on host \S+ was not ready for fn in time"),
    "at rendezvous": (RankFailedError, r"Rank 0 on host \S+ raised DeadlineExceededError: .*the address of rank 1"),
    "in mid-training": (RankFailedError, r"Rank 0 on host \S+ raised PeerLostError: .*not submitted by rank 1"),
    "at the end": (
        RankFailedError,
        _NAMED + r"did not hand over what fn returned within 2 s[\s\S]*The last lines [\s\S]* in __reduce__",
    ),
}
_ALWAYS = {
    *(("local", how, phase) for how in ("raise", "kill") for phase in PHASES),
    *(("local", "exit", phase) for phase in PHASES[:3]),
    *(("local", how, "in mid-training") for how in ("memory", "disk")),
    *(("local", "hang", phase) for phase in ("before registration", "in mid-training", "at the end")),
    *(("barrier", "kill", phase) for phase in ("before registration", "at rendezvous", "at the end")),
    *(("mpi", how, phase) for how, phase in (("kill", "at rendezvous"), ("raise", "at the end"))),
}


def _rows() -> list[Fault]:
    rows = []
    for launcher in LAUNCHERS:
        for phase in PHASES:
            for how, (said, importing, packing) in _SAID.items():
                words = _NAMED + (packing if phase == "at the end" else said)
                if phase == "before registration":
                    of_any = rf"Rank \d on host \S+ {said}"
                    words = of_any if how in {"exit", "kill"} else _IMPORTING + importing
                rows.append(Fault(how, phase, launcher, RankFailedError, words, (launcher, how, phase) in _ALWAYS))
            hang = _HANGING[phase]
            rows.append(Fault("hang", phase, launcher, *hang, (launcher, "hang", phase) in _ALWAYS))
    # Open MPI starts no rank whose Python does not get as far as registering.
    return [row for row in rows if (row.launcher, row.phase) != ("mpi", "before registration")]


FAULTS = _rows()


def produced(fault: Fault, folder: Path, spark: SparkSession) -> Ended:
    """Run a job in which the fault happens."""
    environment = {"FAULT": fault.how, "FAULT_FOLDER": str(folder)}
    if fault.how == "hang":  # what bounds the waits of the others, long by default
        environment |= {"SPARKHVD_START_TIMEOUT": str(_START_SECONDS), "SPARKHVD_RESULT_TIMEOUT": "2"}
        environment |= {"SPARKHVD_STALL_CHECK_SECONDS": "1", "SPARKHVD_STALL_SHUTDOWN_SECONDS": "2"}
    early = fault.phase == "before registration"
    preload = ("tests.launch.faulty_module",) if early else ()
    start_seconds = _START_SECONDS if early and fault.how == "hang" else _LONG
    arguments = (fault.how, fault.phase, str(folder))
    error: Exception | None = None
    try:
        if fault.launcher == "mpi":
            _run_by_mpi(arguments, environment)
        else:
            sparkhvd.run(
                train,
                arguments,
                launcher=fault.launcher,
                num_proc=NUM_PROC,
                env=environment,
                preload=preload,
                start_timeout=start_seconds,
                stdout=io.StringIO(),
                stderr=io.StringIO(),
                spark=spark if fault.launcher == "barrier" else None,
            )
    except LaunchError as raised:
        error = raised
    when = folder / "when"
    seconds = time.time() - float(when.read_text()) if when.exists() else float("nan")
    pids = [int(path.name.partition("-")[2]) for path in folder.glob("pid-*")]
    _wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    return Ended(error, seconds, [pid for pid in pids if psutil.pid_exists(pid)])


def _run_by_mpi(arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    with closing(Launched(train, *arguments, env=environment).handle) as handle:
        handle.wait_started(Deadline.after(_LONG))
        for content in handle.results():
            cloudpickle.loads(content)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline, pause = time.monotonic() + 10.0, threading.Event()
    while not condition() and time.monotonic() < deadline:
        pause.wait(0.05)


def complaints(fault: Fault, ended: Ended) -> list[str]:
    """What is not as it has to be."""
    found = []
    if type(ended.error) is not fault.error or not re.match(fault.words, str(ended.error)):
        found.append(f"{type(ended.error).__name__}: {ended.error}")
    if not ended.seconds < SECONDS:
        found.append(f"the error came after {ended.seconds:.1f} s")
    if ended.left:
        found.append(f"processes {ended.left} were left")
    return found
