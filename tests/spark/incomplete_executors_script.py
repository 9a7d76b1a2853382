"""Run by test_incomplete_executors.py in a separate process: executors keep the files that Spark sent to them.

Arguments: a Python without sparkhvd for the tasks, and files of sparkhvd that Spark sends there, one after the other.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # executors would inherit PYTHONPATH

import torch
from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd.errors import SparkHvdError
from tests.scripts import print_results


def rank() -> int:
    return 1


def failure_of(action: Callable[[], object]) -> str:
    """Return the error of an action, or a text with its result."""
    try:
        return f"no error, but {action()}"
    except SparkHvdError as error:
        return f"{type(error).__name__}: {error}"


def main(python: str, *files: str) -> None:
    builder = SparkSession.builder.master("local-cluster[1,1,1024]").config("spark.ui.enabled", "false")
    # Unlike this setting, spark.pyspark.python is checked by the driver before a job on its own machine.
    builder = builder.config("spark.sql.execution.pyspark.python", python)
    spark = builder.config("spark.log.level", "OFF").getOrCreate()
    logging.disable(logging.WARNING)
    net = torch.nn.Linear(1, 1)
    estimator = sparkhvd.TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 1]],
        num_proc=1,
        store=sparkhvd.Store.create(str(Path.cwd() / "store")),
    )
    df = spark.range(8).selectExpr("cast(id as float) x", "cast(1 as float) y")
    actions: dict[str, Callable[[], object]] = {
        "run": lambda: sparkhvd.run(rank, num_proc=1),
        "preflight": lambda: sparkhvd.preflight(num_proc=1, stdout=io.StringIO()),
        "fit": lambda: estimator.fit(df),
    }
    failures = {}
    for file in files:
        spark.sparkContext.addPyFile(file)
        failures[Path(file).suffix] = {name: failure_of(action) for name, action in actions.items()}
    print_results(failures)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
