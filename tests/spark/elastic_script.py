"""Run by test_elastic.py in a separate process: dynamic allocation is set before Spark starts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import psutil
from pyspark.sql import SparkSession

import sparkhvd
from tests.launch import elastic_training as training
from tests.scripts import print_results
from tests.waiting import happens


def kill_executor_of_second(folder: Path) -> None:
    """Kill the executor of the rank that joined, after some steps with it."""

    def second() -> int | None:
        for path in folder.glob("log-*"):
            lines = path.read_text().splitlines()
            if sum(line.endswith(" 2") for line in (one.rpartition(" ")[0] for one in lines)) >= 5:
                pid = int(path.name.removeprefix("log-"))
                if lines[0].split()[3] == "2":
                    return pid
        return None

    assert happens(lambda: second() is not None, 200)
    rank = psutil.Process(second())
    executor = next(one for one in rank.parents() if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline()))
    os.kill(executor.pid, signal.SIGKILL)


def main(folder: Path) -> None:
    settings = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.initialExecutors": "1",
        "spark.dynamicAllocation.minExecutors": "1",
        "spark.dynamicAllocation.maxExecutors": "2",
        # Longer than the first rank needs to start on a slow machine, so that the job begins with one rank.
        "spark.dynamicAllocation.schedulerBacklogTimeout": "15s",
        "spark.executor.memory": "600m",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
    }
    builder = SparkSession.builder.master("local-cluster[2,1,600]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    threading.Thread(target=kill_executor_of_second, args=(folder,), daemon=True).start()
    sizes = (1, 2, 1, 2)
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
            "sizes": [1, *results[0][5]],
            "ranks": [result[2:4] for result in results],
            "total": results[0][1],
            "expected": float(sum(range(1, results[0][0] + 1))),
            "first": beginners == [f"log-{results[0][4]}"],
            "jobs": len(jobs.getActiveJobsIds()),
        }
    )
    session.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
