"""Run by test_packed_environments.py in a separate process: its executors get a packed environment.

Arguments: the way to send it (``archives`` or ``artifacts``), and the archive.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # executors would inherit PYTHONPATH

import torch
from pyspark.sql import SparkSession

import sparkhvd
from tests.scripts import print_results

MASTER, PYTHON = "local-cluster[2,1,1024]", "./training/bin/python"


def session(how: str, archive: str) -> SparkSession:
    named, builder = f"{archive}#training", SparkSession.builder.config("spark.ui.enabled", "false")
    builder = builder.config("spark.log.level", "ERROR")
    if how == "archives":
        os.environ["PYSPARK_PYTHON"] = PYTHON  # like spark-submit with spark.pyspark.python
        return builder.config("spark.archives", named).master(MASTER).getOrCreate()
    spark = builder.remote(MASTER).getOrCreate()
    spark.addArtifacts(named, archive=True)
    spark.conf.set("spark.sql.execution.pyspark.python", PYTHON)
    return spark


def where() -> tuple[str, str, float]:
    import sparkhvd.torch as hvd  # noqa: PLC0415

    hvd.init()
    total = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="total")
    return sys.executable, sparkhvd.__file__, float(total[0])


def main(how: str, archive: str) -> None:
    spark = session(how, archive)
    net = torch.nn.Linear(1, 1)
    estimator: Any = sparkhvd.TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 1]],
        num_proc=2,
        epochs=3,
        verbose=0,
    )
    df = spark.range(64).selectExpr("cast(id / 64 as float) x", "cast(id / 32 as float) y")
    model = estimator.fit(df)
    losses = [record["train"]["loss"] for record in model.getHistory()]
    print_results(
        {"ranks": sparkhvd.run(where, num_proc=2), "losses": losses, "predictions": model.transform(df).count()}
    )
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
