"""Run by test_run_clusters.py in a process of its own: one process can hold one SparkContext only."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd.errors import SlotsError


def place() -> dict[str, int]:
    print("hello")
    return {n.lower(): int(os.environ[f"SPARKHVD_{n}"]) for n in ("RANK", "SIZE", "LOCAL_RANK", "CROSS_SIZE")}


def sum_on_third_attempt(folder: str) -> float:
    """In the first attempt rank 1 kills its Spark task's process, in the second its executor; rank 0 waits for it."""
    import numpy as np  # noqa: PLC0415

    from sparkhvd.comm import session  # noqa: PLC0415
    from sparkhvd.comm.buffers import ReduceOp  # noqa: PLC0415

    session.init()
    communicator = session.current()
    rank = communicator.world.rank
    attempt = len(list(Path(folder).glob(f"{rank}-*")))
    task = psutil.Process().parents()[0]
    Path(folder, f"{rank}-{attempt}").write_text(f"{os.getpid()} {task.pid}")
    communicator.barrier(name="all are written down")
    if rank == 1 and attempt == 0:
        task.kill()
    if rank == 1 and attempt == 1:
        next(parent for parent in task.parents() if parent.name() == "java").kill()
    return float(communicator.allreduce(np.array([rank + 1.0]), ReduceOp.SUM, name="sum")[0])


def pids_left(folder: Path) -> list[int]:
    """The ranks, of any attempt, that still run after a while."""
    pids = {int(pid) for path in folder.iterdir() for pid in path.read_text().split()}
    running = [one for one in psutil.process_iter(["cmdline"]) if one.pid in pids]
    workers = [one for one in running if "sparkhvd.task.worker" in (one.info["cmdline"] or [])]
    return [process.pid for process in psutil.wait_procs(workers, timeout=20.0)[1]]


def main(master: str, folder: Path) -> None:
    builder = SparkSession.builder.master(master).config("spark.executor.memory", "700m")
    # One compiler less starts faster; nothing here runs long.
    for process in ("driver", "executor"):
        builder.config(f"spark.{process}.extraJavaOptions", "-XX:TieredStopAtLevel=1")
    # How often a barrier stage looks for the executor that replaces a killed one.
    builder.config("spark.scheduler.barrier.maxConcurrentTasksCheck.interval", "1s")
    session = builder.config("spark.ui.enabled", "false").config("spark.log.level", "ERROR").getOrCreate()
    try:
        found: dict[str, object] = {"places": sparkhvd.run(place, num_proc=2)}
        try:
            sparkhvd.run(place, num_proc=3)
        except SlotsError as error:
            found["slots"] = str(error)
        folder.mkdir()
        found["sums"] = sparkhvd.run(sum_on_third_attempt, (str(folder),), num_proc=2)
        found["attempts"] = len(list(folder.glob("1-*")))
        found["left"] = pids_left(folder)
    finally:
        session.stop()
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
