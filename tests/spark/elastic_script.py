"""Run by test_elastic.py in a separate process: dynamic allocation is set before Spark starts.

python elastic_script.py FOLDER {killed|decommissioned}...
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd.driver.preflight.preflight import RequestedTasks
from sparkhvd.driver.preflight.report import Verdict
from sparkhvd.driver.spark.resources import TaskResources
from tests.launch import elastic_training as training
from tests.scripts import print_results
from tests.waiting import happens


class Messages(logging.Handler):
    """Collects the log messages of the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


SETTINGS = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.initialExecutors": "1",
    "spark.dynamicAllocation.minExecutors": "1",
    "spark.dynamicAllocation.maxExecutors": "2",
    # Longer than the first rank needs to start on a slow machine, so that the job begins with one rank.
    "spark.dynamicAllocation.schedulerBacklogTimeout": "15s",
    "spark.decommission.enabled": "true",
    "spark.executor.memory": "600m",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
}
SIGNALS = {"killed": signal.SIGKILL, "decommissioned": signal.SIGPWR}  # Spark's executors have a handler of the second


def end_executors(folder: Path, ends: Sequence[str]) -> None:
    """End the executor of each rank that joins, after some steps with it."""
    ended: set[int] = set()

    def joined() -> int | None:
        for path in folder.glob("log-*"):
            lines = path.read_text().splitlines()
            pid = int(path.name.removeprefix("log-"))
            if len(lines) >= 5 and lines[0].split()[3] == "2" and pid not in ended:
                return pid
        return None

    for end in ends:
        assert happens(lambda: joined() is not None, 200)
        rank = psutil.Process(joined())
        executor = next(one for one in rank.parents() if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline()))
        ended.add(rank.pid)
        os.kill(executor.pid, SIGNALS[end])


@dataclass(frozen=True)
class Requirements:
    """The part of an estimator that the preflight asks for the ranks."""

    tasks: RequestedTasks

    def getStore(self) -> None:  # noqa: N802 - named like all getters of Spark's estimators
        return None

    def requested_tasks(self) -> RequestedTasks:
        return self.tasks


def slots_check(session: SparkSession, *arguments: int, **sizes: int) -> tuple[str, str]:
    """Return the verdict of the preflight on the slots, and its message."""
    estimator = Requirements(RequestedTasks(None, TaskResources(), **sizes)) if sizes else None
    report = sparkhvd.preflight(session, *arguments, estimator=estimator, timeout=100.0, stdout=io.StringIO())
    checks = {check.name: check for check in report.checks}
    assert checks["elastic"].verdict is Verdict.OK, checks["elastic"]
    assert len(report.tasks) == 1
    return checks["slots"].verdict.name, checks["slots"].says


def main(folder: Path, ends: Sequence[str]) -> None:
    builder = SparkSession.builder.master("local-cluster[2,1,600]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    checks = {
        "of any job": slots_check(session, 2),
        "too large": slots_check(session, 3),
        "elastic": slots_check(session, 1, min_num_proc=1, max_num_proc=2),
        "never as large": slots_check(session, 1, min_num_proc=1, max_num_proc=3),
        "never large enough": slots_check(session, 3, min_num_proc=3, max_num_proc=3),
    }
    threading.Thread(target=end_executors, args=(folder, ends), daemon=True).start()
    messages = Messages()
    logging.getLogger("sparkhvd").addHandler(messages)
    sizes = (1, 2, *(1, 2) * len(ends))
    results = sparkhvd.run_elastic(
        training.train,
        (10, str(folder), {}, sizes),
        num_proc=1,
        max_num_proc=2,
        start_timeout=120,
        elastic_timeout=120,
        cooldown_range=(0.5, 5),
    )
    beginners = [path.name for path in folder.glob("log-*") if path.read_text().startswith("step 1 ")]
    jobs = session.sparkContext.statusTracker()
    happens(lambda: not jobs.getActiveJobsIds(), 10)
    print_results(
        {
            "checks": checks,
            "sizes": [1, *results[0][5]],
            "ranks": [result[2:4] for result in results],
            "total": results[0][1],
            "expected": float(sum(range(1, results[0][0] + 1))),
            "first": beginners == [f"log-{results[0][4]}"],
            "losses": sum("was lost with its Spark task" in text for text in messages.texts),
            "decommissioned": [text for text in messages.texts if text.startswith("Spark decommissions")],
            "jobs": len(jobs.getActiveJobsIds()),
        }
    )
    session.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
