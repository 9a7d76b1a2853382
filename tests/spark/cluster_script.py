"""Run by test_run_clusters.py in a separate process: one process can hold one SparkContext only.

python cluster_script.py MASTER FOLDER {run|interrupted|executor lost|torch|lightning|keras}...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import psutil
from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd import Store
from sparkhvd.driver.spark.task_exchange import TaskExchange
from sparkhvd.errors import SlotsError
from sparkhvd.rpc.messages import Message
from tests.launch.faults import FAULTS, complaints, inject
from tests.launch.losses import EXECUTOR_FAULTS
from tests.scripts import print_results
from tests.spark import trainings
from tests.waiting import happens


def place() -> dict[str, int]:
    print("hello")
    return {n.lower(): int(os.environ[f"SPARKHVD_{n}"]) for n in ("RANK", "SIZE", "LOCAL_RANK", "CROSS_SIZE")}


def sum_on_third_attempt(folder: str) -> float:
    """Kill the Spark task of rank 1 in the first attempt, and its executor in the second; return a sum in the third."""
    import numpy as np  # noqa: PLC0415

    from sparkhvd.comm import session  # noqa: PLC0415
    from sparkhvd.comm.collectives.buffers import ReduceOp  # noqa: PLC0415

    session.init()
    communicator = session.current()
    rank = communicator.world.rank
    attempt = len(list(Path(folder).glob(f"{rank}-*")))
    task = psutil.Process().parents()[0]
    Path(folder, f"{rank}-{attempt}").write_text(f"{os.getpid()} {task.pid}")
    communicator.barrier(name="all have written")
    if rank == 1 and attempt == 0:
        task.kill()
    if rank == 1 and attempt == 1:
        next(parent for parent in task.parents() if parent.name() == "java").kill()
    return float(communicator.allreduce(np.array([rank + 1.0]), ReduceOp.SUM, name="sum")[0])


_handle = TaskExchange.handle


def noted(answers: list[object], meeting: TaskExchange, message: Message) -> object:
    answers.append(_handle(meeting, message))
    return answers[-1]


def losing_an_executor(session: SparkSession, framework: str, folder: Path) -> dict[str, object]:
    """Return the weights of an undisturbed fit and of one that loses an executor, and the latter's steps of rank 0."""
    df = session.range(80).selectExpr(*trainings.ROWS)
    store = Store.create(str(folder / "store"))
    kill = trainings.Kill(str(folder), 1, 4, executor=True)
    undisturbed = trainings.estimator(framework, store, batch_size=5, backend="local")
    resumed = trainings.estimator(framework, store, kill, batch_size=5)
    with mock.patch.dict(os.environ, SPARKHVD_WARM_SECONDS="60"):  # imports the framework once
        weights: dict[str, object] = {"undisturbed": trainings.weights(framework, undisturbed.fit(df))}
    weights["resumed"] = trainings.weights(framework, resumed.fit(df))
    return {**weights, "steps": (folder / "steps").read_text().split()}


def mpi_without_an_executor(session: SparkSession, folder: Path) -> list[str]:
    """Return the problems of a job whose MPI ranks lose their executor."""
    fault = next(one for one in EXECUTOR_FAULTS if one.name == "executor killed, in mid-training, mpi")
    return complaints(fault, inject(fault, folder, session))


def mpi_interrupted(session: SparkSession, folder: Path) -> list[str]:
    """Return the problems of a job whose driver is interrupted while a task waits for the other."""
    fault = next(one for one in FAULTS if one.name == "driver interrupted, before registration, mpi")
    before = executors(session)
    wrong = complaints(fault, inject(fault, folder, session))
    # A task that is interrupted in Spark's own ``allGather`` would end its JVM.
    lost = happens(lambda: executors(session) != before, 5.0)
    return [*wrong, *([f"executors {before} have become {executors(session)}"] if lost else [])]


def executors(session: SparkSession) -> list[str]:
    found = session.sparkContext._jsc.sc().statusStore().executorList(True)
    return sorted(str(found.apply(number).id()) for number in range(found.size()))


def pids_left(folder: Path) -> list[int]:
    """Return the ranks of all attempts that still run after 20 seconds."""
    pids = {int(pid) for path in folder.iterdir() for pid in path.read_text().split()}
    running = [one for one in psutil.process_iter(["cmdline"]) if one.pid in pids]
    workers = [one for one in running if "sparkhvd.task.worker.main" in (one.info["cmdline"] or [])]
    return [process.pid for process in psutil.wait_procs(workers, timeout=20.0)[1]]


def run(folder: Path) -> dict[str, object]:
    """Run jobs that succeed, that need too many slots, and that lose a task and an executor."""
    answers: list[object] = []
    with mock.patch.object(TaskExchange, "handle", lambda *asked: noted(answers, *asked)):
        results: dict[str, object] = {"places": sparkhvd.run(place, num_proc=2)}
    results["met"] = [type(one.result(0)).__name__ for one in answers if isinstance(one, Future)]
    try:
        sparkhvd.run(place, num_proc=3)
    except SlotsError as error:
        results["slots"] = str(error)
    results["sums"] = sparkhvd.run(sum_on_third_attempt, (str(folder),), num_proc=2)
    results["attempts"] = len(list(folder.glob("1-*")))
    results["left"] = pids_left(folder)
    return results


def main(master: str, folder: Path, parts: Sequence[str]) -> None:
    builder = SparkSession.builder.master(master).config("spark.executor.memory", "700m")
    # Short processes start faster with one compiler less.
    for process in ("driver", "executor"):
        builder.config(f"spark.{process}.extraJavaOptions", "-XX:TieredStopAtLevel=1")
    # The interval at which a barrier stage looks for the executor that replaces a killed one.
    builder.config("spark.scheduler.barrier.maxConcurrentTasksCheck.interval", "1s")
    session = builder.config("spark.ui.enabled", "false").config("spark.log.level", "ERROR").getOrCreate()
    results: dict[str, object] = {}
    try:
        for part in parts:
            own = folder / part
            own.mkdir()
            if part == "run":
                results |= run(own)
            elif part == "interrupted":
                results[part] = mpi_interrupted(session, own)
            elif part == "executor lost":
                results[part] = mpi_without_an_executor(session, own)
            else:
                results[part] = losing_an_executor(session, part, own)
    finally:
        session.stop()
    print_results(results)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
