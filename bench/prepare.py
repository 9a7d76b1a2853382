"""Compare ``prepare_data`` with Spark's own ``df.write.parquet`` of the same rows, in alternating runs.

python -m bench.prepare --rows 1000000 --columns 30 --rounds 5
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from pyspark.sql import SparkSession, functions

from sparkhvd import Store, prepare_data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "2g")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    folder = Path(tempfile.mkdtemp(prefix="sparkhvd-bench-"))
    try:
        measure(spark, folder, options)
    finally:
        spark.stop()
        shutil.rmtree(folder)


def measure(spark: SparkSession, folder: Path, options: argparse.Namespace) -> None:
    names = [f"x{index}" for index in range(options.columns - 1)]
    random = [functions.rand(index).cast("float").alias(name) for index, name in enumerate(names)]
    rows = spark.range(0, options.rows, 1, 2).select(*random, (functions.col("id") % 10).cast("float").alias("y"))
    rows.write.parquet(str(folder / "source"))
    df = spark.read.parquet(str(folder / "source"))
    store = Store.create(str(folder / "store"))
    contenders = {
        "df.write.parquet": lambda: df.write.parquet(str(folder / "plain")),
        "prepare_data": lambda: prepare_data(2, store, df, ["y"], names, keep_seconds=0).close(),
        "prepare_data, kept for reuse": lambda: prepare_data(2, store, df, ["y"], names).close(),
        "prepare_data, validation=0.1": lambda: prepare_data(
            2, store, df, ["y"], names, validation=0.1, keep_seconds=0
        ).close(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(options.rounds + 1):
        for name, run in contenders.items():
            started = time.monotonic()
            run()
            if turn:  # the first turn warms up the JVM
                seconds[name].append(time.monotonic() - started)
            shutil.rmtree(folder / "plain", ignore_errors=True)
            shutil.rmtree(folder / "store", ignore_errors=True)
            store = Store.create(str(folder / "store"))
    base = seconds["df.write.parquet"]
    print(f"{options.rows} rows x {options.columns} float columns, {options.rounds} rounds, local[2]")
    for name, times in seconds.items():
        ratio = statistics.median(duration / write for duration, write in zip(times, base, strict=True))
        print(f"{name:34} median {statistics.median(times):6.2f} s   ratio {ratio:5.2f}")


if __name__ == "__main__":
    main()
