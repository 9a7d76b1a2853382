"""Measure how long all ranks take to connect and to end, by launcher and number of ranks.

    python -m bench.startup --rounds 3

The launchers barrier, local and, if Open MPI is installed, mpi take turns with Spark's own TorchDistributor in a
running session. In the rows without a framework, the ranks of TorchDistributor do not even connect. The driver and all
ranks are on this machine, so with more ranks than cores the times include their competition for cores. The program then
repeats a small fit, with new processes and with a warm start.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import DataFrame, SparkSession

import sparkhvd
from bench import machine
from bench.estimators import interleaved, join, join_gloo, join_nothing, join_torch, python_workers, start_spark
from sparkhvd import KerasEstimator, TorchEstimator


def main() -> int:
    options = parse_options()
    print(machine.describe())
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as folder:
        spark = start_spark(Path(folder), max(options.ranks, default=2))
        try:
            for ranks in options.ranks:
                compare(spark, ranks, options.rounds)
            compare_fits(spark, options.rounds)
        finally:
            spark.stop()
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="*",
        default=[2, 4, 8],
        help="numbers of ranks; without a number, only the fits are measured",
    )
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def compare(spark: SparkSession, ranks: int, rounds: int) -> None:
    launchers = ["barrier", "local", *(["mpi"] if shutil.which("mpirun") else [])]
    for title, own, others in (("no framework", join, join_nothing), ("torch", join_torch, join_gloo)):
        turns = {launcher: with_launcher(launcher, own, spark, ranks) for launcher in launchers}
        turns["TorchDistributor"] = with_torch_distributor(others, ranks)
        before = partial(python_workers, spark, ranks)
        medians = interleaved(f"{ranks} ranks, {title}", turns, rounds, warm=True, before=before)
        peer = medians.pop("TorchDistributor")
        parts = [f"{name} {seconds / peer:.2f}" for name, seconds in medians.items()]
        print(f"  of TorchDistributor's time: {', '.join(parts)}", flush=True)


def compare_fits(spark: SparkSession, rounds: int) -> None:
    rows = spark.range(64).selectExpr("float(id) AS x", "float(2 * id) AS y").cache()
    for framework, fit in (("torch", fit_torch), ("keras", fit_keras)):
        turns = {
            "new processes": partial(fit_again, 0, fit, rows),
            "warm start": partial(fit_again, 600, fit, rows),
        }
        medians = interleaved(f"one more fit, 1 epoch of 64 rows, 2 ranks, {framework}", turns, rounds, warm=True)
        print(f"  warm start: {medians['warm start'] / medians['new processes']:.2f} of the time with new processes")


def fit_again(warm_seconds: int, fit: Callable[[DataFrame], object], rows: DataFrame, _: int) -> None:
    os.environ["SPARKHVD_WARM_SECONDS"] = str(warm_seconds)
    fit(rows)


def fit_torch(rows: DataFrame) -> None:
    import torch  # noqa: PLC0415  (heavy)

    model = torch.nn.Linear(1, 1)
    TorchEstimator(
        num_proc=2,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        verbose=0,
    ).fit(rows)


def fit_keras(rows: DataFrame) -> None:
    import keras  # noqa: PLC0415  (heavy)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    KerasEstimator(
        num_proc=2, model=model, optimizer="sgd", loss="mse", feature_cols=["x"], label_cols=["y"], verbose=0
    ).fit(rows)


def with_launcher(launcher: str, fn: Callable[[], int], spark: SparkSession, ranks: int) -> Callable[[int], object]:
    session = None if launcher == "local" else spark
    return lambda _: sparkhvd.run(fn, num_proc=ranks, launcher=launcher, spark=session, verbose=0)


def with_torch_distributor(fn: Callable[[], int], ranks: int) -> Callable[[int], object]:
    return lambda _: TorchDistributor(num_processes=ranks, local_mode=False, use_gpu=False).run(fn)


if __name__ == "__main__":
    sys.exit(main())
