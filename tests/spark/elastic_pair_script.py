"""Run by test_elastic.py: start two elastic jobs while a fair scheduler gives each job one of two cores."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd.driver.elastic import run as elastic
from sparkhvd.errors import LaunchError
from tests.launch import elastic_training as training
from tests.scripts import print_results
from tests.waiting import happens


def main(folder: Path) -> None:
    logged = io.StringIO()
    logging.getLogger("sparkhvd").addHandler(logging.StreamHandler(logged))
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.scheduler.mode", "FAIR")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    context, results, release_file = session.sparkContext, {}, folder / "release"
    active_jobs = context.statusTracker().getActiveJobsIds

    # With ``executable``, a job does not first ask an executor which modules it can import.
    options = {"num_proc": 2, "start_timeout": 120, "elastic_timeout": 60, "executable": sys.executable}

    def run_in_pool(name: str) -> None:
        context.setLocalProperty("spark.scheduler.pool", name)
        output_folder = folder / name
        output_folder.mkdir()
        results[name] = sparkhvd.run_elastic(training.train, (3, str(output_folder)), spark=session, **options)

    def occupy_slot(_: int) -> None:
        while not release_file.exists():
            time.sleep(0.1)

    threads = [threading.Thread(target=lambda: context.parallelize(range(2), 2).foreach(occupy_slot), daemon=True)]
    threads[0].start()
    assert happens(lambda: len(active_jobs()) == 1, 60)
    # Bypass the common queue, because two clients of Spark Connect, which are separate drivers, have none.
    elastic.turn_of = lambda *_, **__: nullcontext()
    for name in ("a", "b"):
        threads.append(threading.Thread(target=run_in_pool, args=(name,), daemon=True))
        threads[-1].start()
    assert happens(lambda: len(active_jobs()) == 5, 60), "four tasks wait for the two cores"
    release_file.touch()
    for thread in threads:
        thread.join()
    happens(lambda: not active_jobs(), 10)
    print_results(
        {
            "results": {name: [result[:4] for result in ranks] for name, ranks in results.items()},
            "jobs": len(active_jobs()),
            "logged": logged.getvalue(),
            "errors": stop_with_a_waiting_job(session),
        }
    )


def stop_with_a_waiting_job(session: SparkSession) -> list[str]:
    """Stop the session while one job runs and another one waits, and return their errors."""
    errors: list[str] = []

    def run() -> None:
        try:
            sparkhvd.run(time.sleep, (600,), num_proc=2, spark=session)
        except LaunchError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert happens(lambda: len(sparkhvd.slots(session).waiting) == 1, 60)
    session.stop()
    for thread in threads:
        thread.join(60)
    return sorted(errors)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
