"""Measure the preflight in a new Spark session, again in the same session, and as ``sparkhvd doctor``.

    python -m bench.preflight

Each line comes from a separate process with a standalone cluster of two workers, which are hosts with their own
addresses. This needs root and network namespaces. When the first preflight begins, the executors run, but have no
Python workers yet. Every preflight checks a Store. With a framework, it also passes five rows of a DataFrame through a
model. The doctor starts its own session on a local master.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import sparkhvd
from bench import machine
from sparkhvd import Store
from sparkhvd.deadline import Deadline
from sparkhvd.driver.spark.resources import TaskResources
from sparkhvd.driver.spark.slots import reserve_tasks
from tests.launch import hosts
from tests.launch.namespaces_script import session_on

if TYPE_CHECKING:
    from sparkhvd.driver.preflight.preflight import CheckableEstimator

_RANKS = 2
_SECONDS = 120.0
_ROUNDS = 3


def main() -> int:
    if sys.argv[1:]:
        print(measure(sys.argv[1]))
        return 0
    print(machine.describe(), flush=True)
    for framework in ("none", "torch", "keras"):
        print(_output_of([sys.executable, "-m", "bench.preflight", framework]).splitlines()[-1], flush=True)
    start = time.monotonic()
    _output_of([sys.executable, "-m", "sparkhvd.cli.main", "doctor", "--master", "local[2]", "-np", str(_RANKS)])
    print(f"sparkhvd doctor, including its session: {time.monotonic() - start:.1f} s")
    return 0


def measure(framework: str) -> str:
    """Return the line with the times of preflights with an estimator of this framework."""
    with tempfile.TemporaryDirectory() as folder, hosts.cluster(_RANKS, Path(folder)) as cluster:
        os.environ["SPARK_LOCAL_IP"] = cluster.address
        spark = session_on(cluster)
        try:
            df = spark.range(64).selectExpr("id / 64.0D AS x", "3 * id / 64.0D + 1 AS y")
            store = Store.create(f"{folder}/store")
            reserve_tasks(spark, _RANKS, TaskResources(), Deadline.after(_SECONDS))
            seconds = []
            for _ in range(1 + _ROUNDS):
                estimator = None if framework == "none" else estimator_of(framework)
                report = sparkhvd.preflight(
                    spark, _RANKS, store=store, estimator=estimator, df=df, timeout=_SECONDS, stdout=io.StringIO()
                )
                assert report.ok, str(report)
                seconds.append(report.seconds)
        finally:
            spark.stop()
    repeated = sorted(seconds[1:])[_ROUNDS // 2]
    subject = "no estimator" if framework == "none" else f"estimator of {framework}"
    return f"{_RANKS} hosts, a Store, {subject}: {seconds[0]:.1f} s, again {repeated:.1f} s"


def estimator_of(framework: str) -> CheckableEstimator:
    """Return an estimator with a minimal model, and import its framework as a user's program does."""
    if framework == "torch":
        from tests import lines  # noqa: PLC0415

        return lines.estimator(None)
    import keras  # noqa: PLC0415

    from sparkhvd import KerasEstimator  # noqa: PLC0415

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    return KerasEstimator(
        num_proc=_RANKS, model=model, optimizer=keras.optimizers.SGD(), loss="mse", feature_cols=["x"], label_cols=["y"]
    )


def _output_of(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
