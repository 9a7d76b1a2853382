"""Run by test_run_clusters.py and test_yarn.py in a separate process: an elastic job that loses an executor.

python -m tests.launch.elastic_cluster_script MASTER FOLDER [NAME=VALUE]...
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

import sparkhvd
from tests.launch.elastic_training import train
from tests.launch.faults import left_of
from tests.scripts import print_results
from tests.waiting import happens

_SETTINGS = {
    "spark.executor.cores": "1",
    "spark.executor.memory": "600m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
}


def main(master: str, folder: Path, *settings: str) -> None:
    builder = SparkSession.builder.master(master).config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
    for name, value in {**_SETTINGS, **dict(setting.split("=", 1) for setting in settings)}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    folder.mkdir()
    try:
        results = sparkhvd.run_elastic(
            train,
            (10, str(folder), {(5, 1, 2): "kill executor"}, (2, 1, 2)),
            num_proc=2,
            min_num_proc=1,
            start_timeout=200,
            elastic_timeout=200,
            cooldown_range=(0.5, 5),
            verbose=0,
            env={"FAULT_FOLDER": str(folder)},
        )
        ended = time.monotonic()
        happens(lambda: not left_of(folder), 60)
    finally:
        session.stop()
    lost = [line for path in folder.glob("log-*") for line in path.read_text().splitlines() if line.startswith("end ")]
    print_results(
        {
            "ranks": [result[2:4] for result in results],
            "total": [result[1] for result in results],
            "expected": [float(sum(range(1, result[0] + 1))) for result in results],
            "resets": results[0][5],
            "losses": len(lost),
            "left": left_of(folder),
            "seconds": round(ended - float(lost[0].split()[1]), 1),
        }
    )


def check_of_a_lost_executor(results: dict) -> None:
    """Check the results of this program."""
    assert results["ranks"] == [[0, 2], [1, 2]]
    assert results["total"] == results["expected"], "every step counts once"
    assert results["resets"] == [1, 2], "rank 0 has survived"
    assert (results["losses"], results["left"]) == (1, [])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
