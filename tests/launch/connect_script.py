"""Run by test_connect.py in a separate process: a client of Spark Connect cannot have a SparkContext, too.

python connect_script.py [thoroughly]
python connect_script.py ADDRESS FOLDER
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import optuna
import psutil
import pyarrow as pa
import torch
from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd import SparkBackend, Store, TorchModel, tune
from sparkhvd.errors import ConfigError, LaunchError, RankFailedError, SlotsError, StartTimeoutError
from tests import lines
from tests.launch import elastic_training
from tests.scripts import print_results
from tests.waiting import wait_for

ADDRESS = "sc://localhost:15002"


def rank_and_size() -> list[int]:
    print("hello")
    return [int(os.environ[f"SPARKHVD_{name}"]) for name in ("RANK", "SIZE")]


def devices() -> list[str]:
    import sparkhvd.task  # noqa: PLC0415

    return sparkhvd.task.get_available_devices()


def fail() -> None:
    raise ValueError("no luck")


def stay(folder: str) -> None:
    Path(folder, os.environ["SPARKHVD_RANK"]).write_text(str(os.getpid()))
    time.sleep(600)


def interrupted(spark: SparkSession, folder: Path) -> str:
    """Return the error of a job whose tag is interrupted from another thread."""
    messages: list[str] = []

    def run() -> None:
        spark.addTag("mine")
        try:
            sparkhvd.run(stay, (str(folder),), num_proc=2, spark=spark)
        except LaunchError as error:
            messages.append(str(error))

    running = threading.Thread(target=run, name="tagged")
    running.start()
    wait_for_files(folder, 2)
    spark.interruptTag("mine")
    running.join(60)
    return "".join(messages)


def executor() -> int:
    return next(process.pid for process in psutil.Process().parents() if process.name() == "java")


def interrupted_with_slow_rows(spark: SparkSession, folder: Path) -> list[list[int]]:
    """Return the ranks' executors before and after an interrupted job in which one task had no rows yet."""

    def slow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyspark  # noqa: PLC0415

        yield from batches
        Path(folder, uuid.uuid4().hex).touch()
        if pyspark.TaskContext.get().partitionId():
            time.sleep(600)

    rows = spark.range(2, numPartitions=2).mapInArrow(slow, "id long")
    before = sparkhvd.run(executor, num_proc=2, spark=spark)

    def run() -> None:
        spark.addTag("rows")
        with contextlib.suppress(LaunchError):
            sparkhvd.run(rank_and_size, num_proc=2, spark=spark, rows=rows)

    running = threading.Thread(target=run, name="tagged")
    running.start()
    wait_for_files(folder, 2)
    wait_for(lambda: any(serves_itself(process) for process in psutil.Process(before[0]).children(True)), 120.0)
    spark.interruptTag("rows")
    running.join(60)
    return [before, sparkhvd.run(executor, num_proc=2, spark=spark)]


def serves_itself(process: psutil.Process) -> bool:
    """Return whether a process is connected to its own server; task 0 is, while it waits for the rows of others."""
    try:
        connections = process.net_connections("tcp")
    except psutil.Error:  # it has ended
        return False
    ports = {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
    return any(one.raddr.port in ports for one in connections if one.status == psutil.CONN_ESTABLISHED)


def left_by_interrupt(folder: Path) -> list[int]:
    """Return the ranks that still run after Ctrl-C."""

    def press() -> None:
        wait_for_files(folder, 2)
        os.kill(os.getpid(), signal.SIGINT)

    user = threading.Thread(target=press, name="user")
    user.start()
    try:
        sparkhvd.run(stay, (str(folder),), num_proc=2)
    except KeyboardInterrupt:
        return still_running(folder, 30.0)
    finally:
        user.join()
    raise AssertionError("Ctrl-C did not end the job")


def still_running(folder: Path, seconds: float) -> list[int]:
    """Return the processes that wrote their ids into the folder and have not ended after ``seconds``."""
    pids = [int(path.read_text()) for path in folder.iterdir()]
    running = [process for process in psutil.process_iter() if process.pid in pids]
    return [process.pid for process in psutil.wait_procs(running, timeout=seconds)[1]]


def refused_while_busy(spark: SparkSession, folder: Path, busy: int) -> str:
    """Return the error of a job of two ranks while other tasks occupy ``busy`` of the two slots."""

    def occupy(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        Path(folder, uuid.uuid4().hex).touch()
        time.sleep(600)
        yield from batches

    def run() -> None:
        spark.addTag("busy")
        with contextlib.suppress(Exception):
            spark.range(busy, numPartitions=busy).mapInArrow(occupy, "id long").collect()

    others = threading.Thread(target=run, name="others")
    others.start()
    wait_for_files(folder, busy)
    try:
        sparkhvd.run(rank_and_size, num_proc=2, spark=spark, start_timeout=5)
    except StartTimeoutError as error:
        return str(error)
    finally:
        spark.interruptTag("busy")
        others.join(60)
    return ""


def stay_until_end(folder: str) -> None:
    Path(folder, os.environ["SPARKHVD_RANK"]).touch()
    while not Path(folder, "end").exists():
        time.sleep(0.05)


def slots_of_two_jobs(spark: SparkSession, folder: Path) -> list[str]:
    """Return the slots while a second job of two ranks waits, the error of this job, which is cancelled, and the slots
    after both have ended.
    """
    errors: list[str] = []

    def run(name: str) -> None:
        spark.addTag(name)
        try:
            sparkhvd.run(stay_until_end, (str(folder),), num_proc=2, spark=spark, start_timeout=60)
        except LaunchError as error:
            errors.append(str(error))

    jobs = [threading.Thread(target=run, args=(name,), name=name) for name in ("first", "second")]
    try:
        jobs[0].start()
        wait_for_files(folder, 2)
        jobs[1].start()
        wait_for(lambda: sparkhvd.slots(spark).waiting, 120.0)
        slots = sparkhvd.slots(spark)
        slots.waiting[0].cancel()
        jobs[1].join(60)
    finally:
        (folder / "end").touch()
        for thread in filter(threading.Thread.is_alive, jobs):
            thread.join()
    return [str(slots), *errors, str(sparkhvd.slots(spark))]


def left_by_killed_client(folder: Path) -> list[int]:
    """Return the ranks of a killed client that outlive the timeout of its operation."""
    client = subprocess.Popen([sys.executable, __file__, ADDRESS, str(folder)], env=of_another_client())
    try:
        wait_for_files(folder, 2)
    finally:
        client.kill()
        client.wait()
    return still_running(folder, 100.0)


def of_another_client() -> dict[str, str]:
    """Return the environment for a client other than the one that started the server."""
    return {name: value for name, value in os.environ.items() if name != "SPARK_LOCAL_REMOTE"}


def result_of_doctor() -> list[object]:
    """Return the exit code and the output of ``sparkhvd doctor``."""
    words = ["-m", "sparkhvd.cli.main", "doctor", "--remote", ADDRESS, "-np", "2", "--gpus-per-task", "1"]
    done = subprocess.run(
        [sys.executable, *words], env=of_another_client(), capture_output=True, text=True, timeout=120, check=False
    )
    return [done.returncode, done.stdout + done.stderr]


def wait_for_files(folder: Path, count: int) -> None:
    wait_for(lambda: len(list(folder.iterdir())) >= count, 120.0)


def searched(spark: SparkSession, store: Store) -> dict[str, object]:
    """Return the result of a search of two trials at a time, which Ctrl-C interrupts in its first epoch and which then
    continues.
    """
    epochs: list[int] = []

    def space(trial: optuna.Trial) -> dict[str, object]:
        torch.manual_seed(1)
        model = torch.nn.Linear(1, 1)
        rate = trial.suggest_float("rate", 0.01, 0.3)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=rate)}

    def interrupt(epoch: int, _: Mapping[str, float]) -> None:
        if not epochs:
            os.kill(os.getpid(), signal.SIGINT)
        epochs.append(epoch)

    df = lines.points(spark, "id % 4 = 0 AS held_out")
    estimator = lines.estimator(
        store, model=None, optimizer=None, num_proc=1, validation="held_out", epochs=2, epoch_callback=interrupt
    )
    storage = optuna.storages.InMemoryStorage()
    search = functools.partial(
        tune.minimize, estimator, df, space, 2, parallelism=2, storage=storage, study_name="lines"
    )
    with contextlib.suppress(KeyboardInterrupt):
        search()
        raise AssertionError("Ctrl-C did not end the search")
    result = search()
    predicted = result.best_model.transform(df).where("held_out").select("y", "y__output").collect()
    return {
        "states": sorted(trial.state.name for trial in result.study.trials),
        "best value": result.best_value,
        "mean squared error": sum((row.y - row.y__output) ** 2 for row in predicted) / len(predicted),
        "runs": len({path.split("/")[1] for path in store.list("runs")}),
        "slots": str(sparkhvd.slots(spark)),
    }


def doubled(spark: SparkSession) -> list[float]:
    """Return the predictions of a wrapped network without any training."""
    network = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(network.weight, 1.0)
    df = spark.range(4).selectExpr("CAST(id AS FLOAT) AS x", "CAST(id AS FLOAT) AS same")
    predicted = TorchModel.from_model(network, df, feature_cols=["x", "same"]).transform(df)
    return [row.prediction for row in predicted.orderBy("x").collect()]


class TwoOutputs(torch.nn.Module):
    """A network with one input column and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


def predictions_in_plan(spark: SparkSession) -> int:
    """Return how often a query plan for both outputs of a model calls the model."""
    df = spark.range(4).selectExpr("CAST(id AS FLOAT) AS x")
    plan = io.StringIO()
    with contextlib.redirect_stdout(plan):
        TorchModel.from_model(TwoOutputs(), df, feature_cols=["x"]).transform(df).explain()
    return plan.getvalue().count("[predict(")


def main(thoroughly: bool) -> None:
    builder = SparkSession.builder.remote("local-cluster[1,2,1024]").config("spark.log.level", "ERROR")
    builder.config("spark.executor.memory", "700m")
    for who in ("worker", "executor"):
        builder.config(f"spark.{who}.resource.gpu.amount", "2")
        builder.config(f"spark.{who}.resource.gpu.discoveryScript", os.environ["GPU_SCRIPT"])
    builder.config("spark.task.resource.gpu.amount", "0.5")
    builder.config("spark.connect.execute.manager.detachedTimeout", "4s")
    builder.config("spark.connect.execute.manager.maintenanceInterval", "1s")
    builder.config("spark.connect.execute.reattachable.senderMaxStreamDuration", "2s")
    spark = builder.getOrCreate()
    results: dict[str, object] = {"module": type(spark).__module__}
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SPARKHVD_WARM_SECONDS"] = "60"  # the imports of the frameworks would take most of the time
            results |= of_every_run(spark, folder)
            if thoroughly:
                results |= of_thorough_runs(spark)
            del os.environ["SPARKHVD_WARM_SECONDS"]
            results |= interrupts_of_every_run(spark, Path(folder))
            if thoroughly:
                results |= interrupts_of_thorough_runs(spark, Path(folder))
            results["places afterwards"] = sparkhvd.run(rank_and_size, num_proc=2)
    finally:
        spark.stop()
    print_results(results)


def error_of(error: type[Exception], action: Callable[[], object]) -> str:
    """Return the message of the error that an action must raise."""
    try:
        return f"no error, but {action()}"
    except error as raised:
        return str(raised)


def of_every_run(spark: SparkSession, folder: str) -> dict[str, object]:
    run = functools.partial(sparkhvd.run, rank_and_size)
    results: dict[str, object] = {
        "places": run(num_proc=2),
        "failure": error_of(RankFailedError, lambda: sparkhvd.run(fail, num_proc=2)),
        "slots": error_of(SlotsError, lambda: run(num_proc=3, start_timeout=3)),
        "mpi": error_of(ConfigError, lambda: run(num_proc=1, use_mpi=True)),
        "gpus": sparkhvd.run(devices, num_proc=2, gpus_per_task=1),
        "slots for GPUs": error_of(SlotsError, lambda: run(num_proc=2, gpus_per_task=2, start_timeout=3)),
        "elastic": elastic(Path(folder)),
    }
    spark.conf.set("spark.sql.leafNodeDefaultParallelism", "7")
    results["hidden cores"] = error_of(SlotsError, run)
    results["hidden slots"] = error_of(ConfigError, lambda: sparkhvd.slots(spark))
    results["preflight with hidden cores"] = [
        [report.ok, str(report)]
        for report in (sparkhvd.preflight(num_proc=ranks, stdout=io.StringIO()) for ranks in (2, None))
    ]
    spark.conf.unset("spark.sql.leafNodeDefaultParallelism")
    results["errors without a Store"] = lines.errors(
        spark, None, num_proc=None, backend=SparkBackend(2, gpus_per_task=1)
    )
    results["errors with a Store"] = lines.errors(spark, Store.create(f"{folder}/store"))
    results["search"] = searched(spark, Store.create(f"{folder}/searches"))
    results["doubled"] = doubled(spark)
    results["predictions"] = predictions_in_plan(spark)
    return results


def elastic(folder: Path) -> list[object]:
    """Return ranks, sizes, and whether each step counted once, of a job that loses rank 0 and gets another rank."""
    logs = folder / "elastic"
    logs.mkdir()
    arguments = (10, str(logs), {(5, 0, 2): "kill"}, (2, 1, 2))
    limits = {"start_timeout": 120, "elastic_timeout": 120, "cooldown_range": (0.5, 5)}
    results = sparkhvd.run_elastic(elastic_training.train, arguments, num_proc=2, min_num_proc=1, **limits)
    return [[rank, size, total == sum(range(1, step + 1))] for step, total, rank, size, *_ in results]


def of_thorough_runs(spark: SparkSession) -> dict[str, object]:
    report = sparkhvd.preflight(num_proc=2, gpus_per_task=1, stdout=io.StringIO())
    return {
        "gpus without num_proc": sparkhvd.run(devices, gpus_per_task=2),
        "preflight": [report.ok, str(report)],
        "doctor": result_of_doctor(),
        # A Connect server does not send its keys to clients, so they are passed here.
        "errors on S3": lines.errors(spark, Store.create(**json.loads(os.environ["S3_STORE"]))),
    }


def interrupts_of_every_run(spark: SparkSession, folder: Path) -> dict[str, object]:
    return {
        "interrupted": interrupted(spark, made(folder / "interrupted")),
        "left by Ctrl-C": left_by_interrupt(made(folder / "Ctrl-C")),
        "busy": refused_while_busy(spark, made(folder / "busy"), 1),
        "slots of two jobs": slots_of_two_jobs(spark, made(folder / "two jobs")),
    }


def interrupts_of_thorough_runs(spark: SparkSession, folder: Path) -> dict[str, object]:
    return {
        "executors of slow rows": interrupted_with_slow_rows(spark, made(folder / "slow rows")),
        "all busy": refused_while_busy(spark, made(folder / "all busy"), 2),
        "left by a killed client": left_by_killed_client(made(folder / "killed")),
    }


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    if sys.argv[2:]:
        sparkhvd.run(stay, (sys.argv[2],), num_proc=2, spark=SparkSession.builder.remote(sys.argv[1]).getOrCreate())
    else:
        main(sys.argv[1:] == ["thoroughly"])
