"""Rows of the fault matrix in which processes of Spark are lost: executors, the driver, the driver's JVM."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

from pyspark.sql import SparkSession

from sparkhvd.errors import LaunchError
from tests.launch.faults import LAUNCHERS, PHASES, SECONDS, WHEN, Fault
from tests.scripts import results_of, run_script
from tests.waiting import happens

ATTEMPTS = 2
_ROOT = Path(__file__).parents[2]
# Each attempt waits for the executor that replaces the killed one.
_SECONDS = ATTEMPTS * SECONDS
_EARLY = "before its rank was assigned"


def _executor_lost(when: str) -> str:
    return (
        r"Spark aborted the job: executor \d+ on host 127\.0\.0\.1, which ran task [01] "
        rf"\({when}\), was lost \(Command exited with code 137\)\. See the executor's log\. "
        rf"This was the last of {ATTEMPTS} attempts\."
    )


def _task_lost(when: str) -> str:
    return (
        rf"Task 1 on host 127\.0\.0\.1, the task of rank 1, was lost \({when}\): its Python worker or its executor was "
        "killed or crashed"
    )


def _rank_was(phase: str) -> str:
    """Return the progress that the ranks of both tasks may have; workers start before their ranks are assigned."""
    ranked = rf"rank [01], {WHEN[phase]}"
    return f"({ranked}|{_EARLY})" if phase == PHASES[0] else ranked


_ENDED = "Spark has ended: the JVM of this driver no longer responds"


def _no_jvm(phase: str) -> str:
    return f"{_ENDED}|{_task_lost(WHEN[phase])}"


# For a cluster that aborts a stage after ATTEMPTS attempts.
EXECUTOR_FAULTS = [
    *(Fault("executor killed once", phase, "barrier", None, "", seconds=_SECONDS) for phase in PHASES),
    *(
        Fault("executor killed", phase, "barrier", LaunchError, _executor_lost(_rank_was(phase)), seconds=_SECONDS)
        for phase in PHASES
    ),
    Fault("executor killed once", PHASES[0], "mpi", None, "", seconds=_SECONDS),
    Fault("executor killed", PHASES[0], "mpi", LaunchError, _executor_lost(_EARLY), seconds=_SECONDS),
    *(Fault("executor killed", phase, "mpi", LaunchError, _task_lost(WHEN[phase])) for phase in PHASES[1:]),
]
DRIVER_FAULTS = [
    *(Fault("driver killed", phase, launcher, None, "") for launcher in LAUNCHERS for phase in PHASES),
    # Executors in separate JVMs, which the driver does not start itself.
    *(Fault("driver of a cluster killed", phase, launcher, None, "") for launcher in LAUNCHERS[1:] for phase in PHASES),
    *(
        Fault("Spark killed", phase, launcher, LaunchError, _no_jvm(phase))
        for launcher in LAUNCHERS[1:]
        for phase in PHASES
    ),
    Fault("driver killed", PHASES[2], "elastic", None, ""),
    Fault("driver of a cluster killed", PHASES[2], "elastic", None, ""),
    Fault("Spark killed", PHASES[2], "elastic", LaunchError, _ENDED),
    Fault("Spark of a cluster killed", PHASES[2], "elastic", LaunchError, _ENDED),
]
_MARK = "SPARKHVD_TEST_DRIVER"
# Files of Spark and its JVM, which remove them unless they are killed.
_OF_SPARK = re.compile(r"spark-.*|blockmgr-.*|hsperfdata_.*|artifacts-.*|pyspark-.*")


def session_on(master: str) -> SparkSession:
    """Return a quiet session whose cluster aborts a stage after ``ATTEMPTS`` attempts."""
    builder = SparkSession.builder.master(master).config("spark.executor.memory", "700m")
    for process in ("driver", "executor"):
        builder.config(f"spark.{process}.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    builder.config("spark.stage.maxConsecutiveAttempts", str(ATTEMPTS))
    # The interval at which a barrier stage looks for the executor that replaces a killed one.
    builder.config("spark.scheduler.barrier.maxConcurrentTasksCheck.interval", "1s")
    builder.config("spark.driver.host", "127.0.0.1").config("spark.ui.enabled", "false")
    return builder.config("spark.log.level", "ERROR").getOrCreate()


def lost_executors(folder: Path) -> dict[str, tuple[float, str, list[str]]]:
    """Produce ``EXECUTOR_FAULTS`` on one cluster; return seconds, error and complaints by row."""
    command = [sys.executable, "-m", "tests.launch.losses_script", str(folder)]
    return results_of(run_script(command, folder, 900, **_environment(folder)))


def lost_driver(fault: Fault, folder: Path) -> tuple[float, str, list[str]]:
    """Run a job in which the driver or its JVM is killed.

    Returns:
        Seconds until all its processes had ended, the error if a surviving driver raised one, and complaints.
    """
    environment = _environment(folder) | {_MARK: uuid.uuid4().hex}
    memory = set(Path("/dev/shm").iterdir())
    with (folder / "output").open("w") as output:  # not a pipe, which processes that survive the driver would hold open
        subprocess.run(
            [sys.executable, "-m", "tests.launch.losses_script", str(folder), fault.name],
            cwd=_ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            check=False,
            timeout=300,
        )
    happens(lambda: not _marked(environment[_MARK]), 60.0)
    seconds = time.time() - float((folder / "when").read_text())
    error, wrong = "", []
    if fault.error is not None:
        _, error, wrong = json.loads((folder / "output").read_text().rpartition("RESULTS ")[2])[fault.name]
    if not seconds < fault.seconds:
        wrong.append(f"the last process had ended after {seconds:.1f} s")
    if left := _marked(environment[_MARK]):
        wrong.append(f"processes were left: {left}")
    if more := _without_users(set(Path("/dev/shm").iterdir()) - memory):
        wrong.append(f"shared memory was left: {sorted(more)}")
    if files := [path for path in Path(environment["TMPDIR"]).iterdir() if not _OF_SPARK.fullmatch(path.name)]:
        wrong.append(f"files were left: {files}")
    return seconds, error, wrong


def _environment(folder: Path) -> dict[str, str]:
    temporary = folder / "temporary"
    temporary.mkdir(parents=True)
    own = {"PYTHONPATH": str(_ROOT), "TMPDIR": str(temporary), "SPARK_LOCAL_IP": "127.0.0.1"}
    return {**os.environ, **own, "SPARK_LOCAL_DIRS": str(folder / "spark"), "SPARK_WORKER_DIR": str(folder / "spark")}


def _without_users(memory: set[Path]) -> set[Path]:
    """Return the segments that no process maps; other programs on this machine use shared memory, too."""
    for maps in Path("/proc").glob("[0-9]*/maps") if memory else ():
        with suppress(OSError):  # the process has just ended
            mapped = maps.read_text()
            memory = {segment for segment in memory if str(segment) not in mapped}
    return memory


def _marked(mark: str) -> list[str]:
    """Return the processes with the mark in their environment, which descendants of the marked process inherit."""
    marked = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{_MARK}={mark}".encode() in entry.read_bytes():
                marked.append((entry.parent / "cmdline").read_text().replace("\0", " ")[:200])
        except OSError:  # the process has just ended
            continue
    return marked
