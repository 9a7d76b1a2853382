"""Run by test_databricks.py in a separate process: one process can hold one SparkContext only."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd import Store
from sparkhvd.task.main import run_task
from sparkhvd.task.mpi.task import run_mpi_task
from tests import lines
from tests.scripts import print_results

if TYPE_CHECKING:
    import pyarrow as pa


def seeing_its_own_gpu(
    run: Callable[..., Iterator[pa.RecordBatch]], job: object, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Run a task that sees only its own GPU, whose CUDA number differs from Spark's number for it."""
    from pyspark import BarrierTaskContext  # noqa: PLC0415 - only in Spark's tasks

    (address,) = BarrierTaskContext.get().resources()["gpu"].addresses
    os.environ["CUDA_VISIBLE_DEVICES"] = str(4 + int(address))
    try:
        yield from run(job, batches)
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]  # Spark reuses this process


def place() -> dict[str, object]:
    import torch  # noqa: PLC0415

    import sparkhvd.task  # noqa: PLC0415

    print("hello")
    return {
        "own": sparkhvd.task.get_available_devices(),
        "seen": os.environ["CUDA_VISIBLE_DEVICES"].split(","),
        "local rank": int(os.environ["SPARKHVD_LOCAL_RANK"]),
        "threads": [torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]],
        "runtime": os.environ["DATABRICKS_RUNTIME_VERSION"],
    }


def main(folder: Path) -> None:
    builder = SparkSession.builder.master("local-cluster[1,4,1024]").config("spark.executor.memory", "700m")
    for who in ("worker", "executor"):
        builder.config(f"spark.{who}.resource.gpu.amount", "2")
        builder.config(f"spark.{who}.resource.gpu.discoveryScript", str(folder / "discover.sh"))
    for process in ("driver", "executor"):
        builder.config(f"spark.{process}.extraJavaOptions", "-XX:TieredStopAtLevel=1")
    builder.config("spark.task.resource.gpu.amount", "1").config("spark.task.cpus", "2")
    session = builder.config("spark.ui.enabled", "false").config("spark.log.level", "ERROR").getOrCreate()
    tasks = {"barrier.run_task": run_task, "mpi.run_mpi_task": run_mpi_task}
    results: dict[str, object] = {}
    try:
        with contextlib.ExitStack() as stack:
            for where, run in tasks.items():
                task = functools.partial(seeing_its_own_gpu, run)
                stack.enter_context(mock.patch(f"sparkhvd.driver.launchers.{where}", task))
            for launcher in ("barrier", "mpi"):
                cell = io.StringIO()
                with contextlib.redirect_stdout(cell):
                    results[launcher] = sparkhvd.run(place, launcher=launcher)
                results[f"printed, {launcher}"] = cell.getvalue()
            store = Store.create(f"dbfs:/{sys.argv[2]}/store")
            results["report"] = str(sparkhvd.preflight(session, store=store, stdout=io.StringIO()))
            sparkhvd.run(place, num_proc=2, stdout=sparkhvd.LogFiles(store, "logs"))
            # Through the Store it would need Databricks' own connector for ``dbfs:``.
            results["error"] = max(lines.errors(session, None, num_proc=None))
    finally:
        session.stop()
    print_results(results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
