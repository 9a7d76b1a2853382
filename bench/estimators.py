"""Compare estimators, transformers and launchers with equivalents written by hand with Spark's own tools.

    python -m bench.estimators --rounds 5

Both sides take turns in every round, so that a busy machine slows both down. Compare the ratios of the medians rather
than the times. A ratio of times below 1 means that sparkhvd takes less time; the ratios of ``transform`` are ratios of
speeds. Figures are on local[2].
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from pyspark.ml.functions import predict_batch_udf
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.types import FloatType

import sparkhvd
from bench import machine
from sparkhvd import Store, TorchEstimator, TorchModel

FEATURES = 30
BATCH = 256
EPOCHS = 2
RANKS = 2
LEARNING_RATE = 0.01
COLUMNS = [f"x{index}" for index in range(FEATURES)]


def main() -> int:
    options = parse_options()
    print(machine.describe())
    print(f"{options.rows:,} rows x {FEATURES} floats, {options.rounds} rounds, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-estimators-") as folder:
        spark = start_spark(Path(folder))
        try:
            rows = make_rows(spark, options.rows)
            ratios: list[tuple[str, float, str]] = []
            if "run" in options.parts:
                ratios += compare_run(spark, options.rounds)
            if "transform" in options.parts:
                ratios += compare_transform(rows, max(options.rounds, 7))
            if "fit" in options.parts:
                ratios += compare_fit(rows, Path(folder), options.rounds)
        finally:
            spark.stop()
    print("\nratios")
    for name, ratio, target in ratios:
        print(f"  {name:<66} {ratio:8.3f}   (target: {target})")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", nargs="*", default=["run", "transform", "fit"])
    return parser.parse_args()


def start_spark(folder: Path, slots: int = RANKS) -> SparkSession:
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    session = (
        SparkSession.builder.master(f"local[{slots}]")
        .appName("bench")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.local.dir", str(folder / "spark"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session


def make_rows(spark: SparkSession, count: int) -> DataFrame:
    """Return rows that Spark keeps in memory, so that no side pays for creating them."""
    drawn = [sql.randn(index).cast("float").alias(name) for index, name in enumerate(COLUMNS)]
    features = spark.range(0, count, numPartitions=RANKS).select("id", *drawn)
    rows = features.withColumn("y", sum((sql.col(name) for name in COLUMNS[:5]), sql.lit(0.0)).cast("float")).cache()
    rows.count()
    return rows


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


# Compare fitting.


def compare_fit(rows: DataFrame, folder: Path, rounds: int) -> list[tuple[str, float, str]]:
    store = Store.create(str(folder / "store"))
    turns = {
        "by hand: Parquet, TorchDistributor, DDP, pyarrow": lambda number: fit_by_hand(rows, folder / f"hand-{number}"),
        "TorchEstimator, direct": lambda _: fit_estimator(rows, None),
        "TorchEstimator, through a Store": lambda _: fit_estimator(rows, store),
    }
    medians = interleaved("fit", turns, rounds)
    hand = medians["by hand: Parquet, TorchDistributor, DDP, pyarrow"]
    return [
        ("fit, direct / by hand", medians["TorchEstimator, direct"] / hand, "at most 0.5"),
        ("fit, through a Store / by hand", medians["TorchEstimator, through a Store"] / hand, "at most 0.7"),
    ]


def fit_estimator(rows: DataFrame, store: Store | None) -> None:
    model = network()
    TorchEstimator(
        num_proc=RANKS,
        store=store,
        keep_data=0.0,  # every round prepares its rows
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        loss=torch.nn.functional.mse_loss,
        feature_cols=COLUMNS,
        label_cols=["y"],
        batch_size=BATCH,
        epochs=EPOCHS,
        random_seed=1,
        verbose=0,
    ).fit(rows)


def fit_by_hand(rows: DataFrame, folder: Path) -> None:
    rows.write.parquet(str(folder))
    distributor = TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False)
    loss = distributor.run(train_by_hand, str(folder), COLUMNS, BATCH, EPOCHS, LEARNING_RATE)
    if not np.isfinite(loss):
        raise RuntimeError(f"The training by hand ended with the loss {loss}.")


def train_by_hand(folder: str, columns: Sequence[str], batch: int, epochs: int, rate: float) -> float:
    """Train with a loop like that of PyTorch's DDP tutorial, on this rank's part of the files."""
    import numpy as np  # noqa: PLC0415  (a rank receives only this function)
    import pyarrow.dataset as ds  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from torch import distributed  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(len(columns), 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    table = ds.dataset(folder).to_table(columns=[*columns, "y"])
    own = table.slice(rank * (table.num_rows // size), table.num_rows // size)
    features = torch.from_numpy(np.stack([own[name].to_numpy() for name in columns], axis=1))
    labels = torch.from_numpy(own["y"].to_numpy().copy()).reshape(-1, 1)
    loss = torch.zeros(())
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels)).split(batch):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(features[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
    distributed.destroy_process_group()
    return float(loss.detach())


# Compare transforming.


def compare_transform(rows: DataFrame, rounds: int) -> list[tuple[str, float, str]]:
    native = network().eval()
    model = TorchModel.from_model(native, rows, feature_cols=COLUMNS)
    count = rows.count()
    sample = rows.limit(max(1, min(2000, count // 10))).cache()
    sample_count = sample.count()
    turns = {
        "TorchModel.transform": lambda _: consume(model.transform(rows).select("prediction")),
        "predict_batch_udf": lambda _: consume(predicted_by_udf(rows, native)),
    }
    medians = interleaved("transform", turns, rounds, warm=True)
    loops = interleaved(
        "transform, row at a time",
        {f"a loop over {sample_count} rows": lambda _: predict_rows(sample, native)},
        2,
        warm=True,
    )
    ours, (loop,) = count / medians["TorchModel.transform"], loops.values()
    sample.unpersist()
    return [
        (
            "transform, rows/s / predict_batch_udf",
            medians["predict_batch_udf"] / medians["TorchModel.transform"],
            "at least 1.2",
        ),
        ("transform, rows/s / a row-at-a-time loop", ours / (sample_count / loop), "at least 40"),
    ]


def consume(rows: DataFrame) -> None:
    """Evaluate all rows without collecting them on the driver."""
    rows.write.format("noop").mode("overwrite").save()


def predicted_by_udf(rows: DataFrame, native: torch.nn.Module) -> DataFrame:
    def make() -> Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]:
        def predict(inputs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
            with torch.no_grad():
                result: npt.NDArray[np.float32] = native(torch.from_numpy(inputs.copy())).numpy()
            return result

        return predict

    predict = predict_batch_udf(make, return_type=FloatType(), batch_size=1024, input_tensor_shapes=[[FEATURES]])
    return rows.select(predict(sql.array(*COLUMNS)).alias("prediction"))


def predict_rows(rows: DataFrame, native: torch.nn.Module) -> None:
    def each(part: Iterator[Row]) -> Iterator[float]:
        for row in part:
            with torch.no_grad():
                yield float(native(torch.tensor([[row[name] for name in COLUMNS]]))[0, 0])

    rows.rdd.mapPartitions(each).count()


# Compare launching.


def compare_run(spark: SparkSession, rounds: int) -> list[tuple[str, float, str]]:
    def distributed(fn: Callable[[], int]) -> Callable[[int], object]:
        return lambda _: TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False).run(fn)

    turns = {
        "sparkhvd.run": lambda _: sparkhvd.run(join, num_proc=RANKS, spark=spark, verbose=0),
        "TorchDistributor": distributed(join_nothing),
        "sparkhvd.run, importing torch": lambda _: sparkhvd.run(join_torch, num_proc=RANKS, spark=spark, verbose=0),
        "TorchDistributor, importing torch": distributed(join_gloo),
    }
    medians = interleaved("run", turns, rounds, before=lambda: python_workers(spark))
    return [
        ("run / TorchDistributor", medians["sparkhvd.run"] / medians["TorchDistributor"], "at most 0.12"),
        (
            "run / TorchDistributor, both importing torch",
            medians["sparkhvd.run, importing torch"] / medians["TorchDistributor, importing torch"],
            "at most 0.6",
        ),
    ]


def python_workers(spark: SparkSession, count: int = RANKS) -> None:
    """Start Spark's Python workers, which TorchDistributor ends, so that the next turn does not pay for them."""
    spark.range(count, numPartitions=count).mapInArrow(lambda batches: batches, "id long").collect()


def join() -> int:
    """Join the communicator without a framework."""
    from sparkhvd.comm import session  # noqa: PLC0415

    session.init()
    return session.current().world.size


def join_torch() -> int:
    import sparkhvd.torch as hvd  # noqa: PLC0415

    hvd.init()
    return int(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())


def join_nothing() -> int:
    """Return at once; torchrun, which starts this function, imports torch anyway."""
    return int(os.environ["WORLD_SIZE"])


def join_gloo() -> int:
    import torch  # noqa: PLC0415
    from torch import distributed  # noqa: PLC0415

    distributed.init_process_group("gloo")
    total = torch.ones(1)
    distributed.all_reduce(total)
    distributed.destroy_process_group()
    return int(total.item())


def interleaved(
    title: str,
    turns: Mapping[str, Callable[[int], object]],
    rounds: int,
    *,
    warm: bool = False,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Return the median seconds of every turn. Every round runs all turns, and ``before`` before each of them."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(-1 if warm else 0, rounds):
        for name, turn in turns.items():
            before()
            started = time.perf_counter()
            turn(number)
            if number >= 0:
                seconds[name].append(time.perf_counter() - started)
    print(f"\n{title}: seconds, median (least to most) of {rounds}")
    for name, times in seconds.items():
        print(f"  {name:<52} {statistics.median(times):8.3f} ({min(times):.3f} to {max(times):.3f})", flush=True)
    return {name: statistics.median(times) for name, times in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
