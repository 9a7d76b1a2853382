"""Run a small program for one set of extras, for `tools/test-wheels`: `python extra_programs.py torch`.

The environment has only a wheel of sparkhvd with these extras. Each function therefore imports the packages of its
extras itself: the other environments lack them.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from types import MappingProxyType

import numpy as np

import sparkhvd
from sparkhvd.errors import StoreError

_ROWS = 64


def _require(condition: bool, what: object) -> None:
    if not condition:
        sys.exit(f"wrong result: {what}")


def _sum_of_ranks() -> float:
    from sparkhvd.comm import session
    from sparkhvd.comm.collectives.buffers import ReduceOp

    session.init()
    communicator = session.current()
    return float(communicator.allreduce(np.array([communicator.world.rank + 1.0]), ReduceOp.SUM, name="sum")[0])


def _without_extras() -> None:
    sums = sparkhvd.run(_sum_of_ranks, num_proc=2, launcher="local")
    _require(sums == [3.0, 3.0], sums)


def _session() -> object:
    from pyspark.sql import SparkSession

    return SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()


def _spark() -> None:
    spark = _session()
    sums = sparkhvd.run(_sum_of_ranks, num_proc=2, spark=spark)
    df = spark.range(_ROWS).selectExpr("cast(id as float) x", "cast(2 * id as float) y")
    with tempfile.TemporaryDirectory() as folder, sparkhvd.prepare_data(2, folder, df, ["y"]) as prepared:
        rows = prepared.train_rows
    _require((sums, rows) == ([3.0, 3.0], _ROWS), (sums, rows))


def _train_torch() -> tuple[float, float]:
    import torch

    import sparkhvd.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(50):
        x = torch.rand(_ROWS, 1)
        optimizer.zero_grad()
        (model(x) - 2 * x).square().mean().backward()
        optimizer.step()
    return model.weight.item(), model.bias.item()


def _torch() -> None:
    first, second = sparkhvd.run(_train_torch, num_proc=2, launcher="local")
    _require(first == second and abs(first[0] - 2) < 0.5, (first, second))


def _train_keras() -> float:
    import keras

    import sparkhvd.keras as hvd

    hvd.init()
    x = np.random.default_rng(hvd.rank()).uniform(size=(_ROWS, 1)).astype("float32")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.2)), loss="mse", jit_compile=False)
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, 2 * x, epochs=20, batch_size=16, callbacks=[start], verbose=0)
    return float(model.get_weights()[0][0, 0])


def _keras() -> None:
    first, second = sparkhvd.run(_train_keras, num_proc=2, launcher="local")
    _require(first == second and abs(first - 2) < 0.5, (first, second))


def _line() -> object:
    import lightning.pytorch as lightning
    import torch

    class Line(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _index: int) -> torch.Tensor:
            x, y = batch
            return torch.nn.functional.mse_loss(self(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.2)

    return Line()


def _train_lightning() -> float:
    import lightning.pytorch as lightning
    import torch

    import sparkhvd.lightning

    x = torch.rand(2 * _ROWS, 1)
    strategy = sparkhvd.lightning.SparkHvdStrategy()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", max_epochs=20, **quiet)
    module = _line()
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), batch_size=16))
    return module.layer.weight.item()


def _lightning() -> None:
    first, second = sparkhvd.run(_train_lightning, num_proc=2, launcher="local")
    _require(first == second and abs(first - 2) < 0.5, (first, second))


def _under_mpirun() -> None:
    from mpi4py import MPI

    from sparkhvd.comm import session

    session.init()
    _require(session.current().world.rank == MPI.COMM_WORLD.rank, "the rank differs from that of MPI")
    sums = _sum_of_ranks()
    _require(sums == 3.0, sums)


def _mpi() -> None:
    options = ["--allow-run-as-root", "--oversubscribe", "-np", "2"]
    mpirun = shutil.which("mpirun") or sys.exit("mpirun is not installed")
    subprocess.run([mpirun, *options, sys.executable, __file__, "under mpirun"], check=True)


def _unreachable(url: str, **options: object) -> None:
    """Require that connecting to a Store without a server fails, and not because a package is missing."""
    try:
        sparkhvd.Store.create(url, **options).exists("file")
    except StoreError as error:
        _require("not installed" not in str(error), error)
    else:
        sys.exit(f"{url} answered, although no server listens there")


def _s3() -> None:
    access = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"}
    _unreachable("s3://bucket/folder", storage_options=access)


def _hdfs() -> None:
    _unreachable("hdfs://127.0.0.1:9/folder")


def _images() -> None:
    import io

    from PIL import Image

    from sparkhvd.data.schema.codecs import peek

    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    with closing(io.BytesIO()) as file:
        Image.fromarray(pixels).save(file, "PNG")
        _require(bool((peek(file.getvalue(), "image") == pixels).all()), "the pixels of an image")


def _fit(estimator: object) -> None:
    df = _session().range(_ROWS).selectExpr("cast(id / 64 as float) x", "cast(id / 32 as float) y")
    model = estimator.fit(df)
    losses = [record["train"]["loss"] for record in model.getHistory()]
    predictions = model.transform(df).count()
    _require(losses[-1] < losses[0] and predictions == _ROWS, (losses, predictions))


_COLUMNS = MappingProxyType(
    {"feature_cols": ["x"], "label_cols": ["y"], "num_proc": 2, "batch_size": 8, "epochs": 5, "verbose": 0}
)


def _spark_and_torch() -> None:
    import torch

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shapes = [[-1, 1]]
    _fit(
        sparkhvd.TorchEstimator(
            model=model, optimizer=optimizer, loss=torch.nn.MSELoss(), input_shapes=shapes, **_COLUMNS
        )
    )


def _spark_and_keras() -> None:
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    _fit(sparkhvd.KerasEstimator(model=model, optimizer=keras.optimizers.SGD(0.1), loss="mse", **_COLUMNS))


def _spark_and_lightning() -> None:
    shapes = {"input_shapes": [[-1, 1]], "label_shapes": [[-1, 1]]}
    _fit(sparkhvd.LightningEstimator(model=_line(), batch_format="tuple", **shapes, **_COLUMNS))


PROGRAMS: MappingProxyType[str, Callable[[], None]] = MappingProxyType(
    {
        "": _without_extras,
        "spark": _spark,
        "torch": _torch,
        "keras": _keras,
        "lightning": _lightning,
        "mpi": _mpi,
        "s3": _s3,
        "hdfs": _hdfs,
        "images": _images,
        "spark,torch": _spark_and_torch,
        "spark,keras": _spark_and_keras,
        "spark,lightning": _spark_and_lightning,
        "under mpirun": _under_mpirun,
    }
)

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
