"""Run by test_yarn.py in a separate process: one process can hold one SparkContext only."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd import Store
from tests import lines
from tests.scripts import print_results


def place() -> dict[str, object]:
    """Return the rank's host, and the sum of all ranks' numbers."""
    import numpy as np  # noqa: PLC0415  (imported where it is needed)

    from sparkhvd.comm import session  # noqa: PLC0415
    from sparkhvd.comm.collectives.buffers import ReduceOp  # noqa: PLC0415

    session.init()
    world = session.current().world
    total = session.current().allreduce(np.array([world.rank + 1.0]), ReduceOp.SUM, name="sum")
    return {
        "rank": world.rank,
        "local_rank": world.local_rank,
        "local_size": world.local_size,
        "shares_memory_with": session.current().local_ranks(),
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
        "container": os.environ["CONTAINER_ID"],
        "tokens": Path(os.environ["HADOOP_TOKEN_FILE_LOCATION"]).is_file(),
        "total": float(total[0]),
    }


def main(staging: str, store: str, discovery: str) -> None:
    builder = SparkSession.builder.master("yarn").appName("ranks on YARN")
    settings = {
        "spark.executor.instances": "2",
        "spark.executor.memory": "600m",
        "spark.executor.memoryOverhead": "2g",  # for the ranks; YARN ends containers that use more
        "spark.executor.resource.gpu.amount": "1",
        "spark.executor.resource.gpu.discoveryScript": discovery,
        "spark.task.resource.gpu.amount": "1",
        "spark.yarn.am.memory": "512m",
        "spark.yarn.jars": f"local:{Path(pyspark.__file__).parent}/jars/*",
        "spark.yarn.stagingDir": staging,
        "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    }
    for name, value in settings.items():
        builder.config(name, value)
    session = builder.getOrCreate()
    try:
        results: dict[str, object] = {
            launcher: sparkhvd.run(place, num_proc=2, launcher=launcher) for launcher in ("barrier", "mpi")
        }
        results["errors"] = lines.errors(session, Store.create(store))
    finally:
        session.stop()
    print_results(results)


if __name__ == "__main__":
    main(*sys.argv[1:])
