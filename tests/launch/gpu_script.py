"""Run by test_gpus.py in a separate process: one process can hold one SparkContext only.

python gpu_script.py DISCOVERY_SCRIPT [with fits]
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd import SparkBackend, Store
from sparkhvd.errors import SlotsError
from tests.scripts import print_results


def devices() -> dict[str, object]:
    import sparkhvd.task  # noqa: PLC0415

    names = (
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "OMP_NUM_THREADS",
        "TF_NUM_INTRAOP_THREADS",
        "SPARKHVD_LOCAL_RANK",
    )
    return {"own": sparkhvd.task.get_available_devices()} | {name: os.environ.get(name) for name in names}


def threads() -> dict[str, object]:
    import torch  # noqa: PLC0415

    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTEROP_THREADS")
    return {"torch": torch.get_num_threads()} | {name: os.environ.get(name) for name in names}


def fitted(session: SparkSession, store: Store) -> dict[str, object]:
    """Return the error of a fit on two ranks with two GPUs each, and the ranks' output."""
    from tests import lines  # noqa: PLC0415 - imports PyTorch

    printed = io.StringIO()
    backend = SparkBackend(2, gpus_per_task=2, stdout=printed)
    errors = lines.errors(session, store, num_proc=None, backend=backend, verbose=1)
    return {"error": max(errors), "printed": printed.getvalue()}


def refused(session: SparkSession, folder: str) -> dict[str, object]:
    """Return the error of a fit that needs more GPUs than exist, and the files that it leaves."""
    from tests import lines  # noqa: PLC0415 - imports PyTorch

    estimator = lines.estimator(Store.create(folder), num_proc=None, backend=SparkBackend(3, gpus_per_task=2))
    result: dict[str, object] = {}
    try:
        estimator.fit(lines.points(session))
    except SlotsError as error:
        result["slots"] = str(error)
    result["left"] = [str(path) for path in Path(folder).rglob("*")]
    report = sparkhvd.preflight(session, estimator=estimator, stdout=io.StringIO())
    return {**result, "preflight": list(report.problems), "devices": [task.devices for task in report.tasks]}


def main(script: str, with_fits: bool) -> None:
    builder = SparkSession.builder.master("local-cluster[1,4,1024]").config("spark.executor.memory", "700m")
    for who in ("worker", "executor"):
        builder.config(f"spark.{who}.resource.gpu.amount", "4")
        builder.config(f"spark.{who}.resource.gpu.discoveryScript", script)
    for process in ("driver", "executor"):
        builder.config(f"spark.{process}.extraJavaOptions", "-XX:TieredStopAtLevel=1")
    # Preparation shares the GPUs; only training asks for whole ones.
    builder.config("spark.task.resource.gpu.amount", "0.25")
    session = builder.config("spark.ui.enabled", "false").config("spark.log.level", "ERROR").getOrCreate()
    try:
        results: dict[str, object] = {
            "two each": sparkhvd.run(devices, num_proc=2, gpus_per_task=2, cpus_per_task=2),
            "one each, by mpi": sparkhvd.run(devices, num_proc=2, gpus_per_task=1, launcher="mpi"),
            "shared": sparkhvd.run(devices, num_proc=2),
            "half each": sparkhvd.run(devices, num_proc=4, gpus_per_task=0.5),
            "the user's": sparkhvd.run(devices, num_proc=1, env={"CUDA_VISIBLE_DEVICES": "7"}),
            "parallelism of the rest": session.range(4, numPartitions=4).rdd.map(lambda _: 1).count(),
        }
        try:
            sparkhvd.run(devices, num_proc=3, gpus_per_task=2)
        except SlotsError as error:
            results["slots"] = str(error)
        if with_fits:
            results["threads"] = sparkhvd.run(threads, num_proc=1)
            with tempfile.TemporaryDirectory() as folder:
                results["refused fit"] = refused(session, folder)
                results["fit"] = fitted(session, Store.create(folder))
    finally:
        session.stop()
    print_results(results)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["with fits"])
