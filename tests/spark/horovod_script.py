"""Programs for Horovod's estimators, which test_horovod_estimators.py runs in separate processes.

python -m tests.spark.horovod_script FOLDER torch|keras|derived
"""

from __future__ import annotations

import os
import sys
from typing import Any

import horovod.spark
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import Store
from pyspark.sql import DataFrame, SparkSession

from tests.scripts import print_results


def double(row: dict[str, Any]) -> dict[str, Any]:
    """Transform one row, like Horovod's ``transformation_fn``."""
    assert row["x"].ndim == 0
    return {"x": row["x"] * 2, "y": row["y"]}


def train_torch(df: DataFrame, folder: str, **common: Any) -> dict[str, object]:
    import torch  # noqa: PLC0415
    from horovod.spark.torch import TorchEstimator, TorchModel  # noqa: PLC0415

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        assert os.environ["OF_THE_DRIVER"] == "here"
        return torch.nn.functional.mse_loss(output, label)

    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    estimator = TorchEstimator(
        backend=SparkBackend(2),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0005),
        loss=loss,
        input_shapes=[[-1, 1]],
        transformation_fn=double,
        reader_pool_type="thread",
        shuffle_buffer_size=10,
        **common,
    ).setReaderPoolType("process")
    fitted = estimator.fit(df)
    fitted.save(f"{folder}/model")
    return {
        "ranks": horovod.spark.run(lambda: os.environ["SPARKHVD_RANK"], num_proc=2),
        "scale_lr": estimator.getScaleLr(),
        "weight": fitted.getModel().weight.item(),
        "columns": TorchModel.load(f"{folder}/model").transform(df).columns,
    }


def train_keras(df: DataFrame, folder: str, **common: Any) -> dict[str, object]:
    import keras  # noqa: PLC0415
    from horovod.spark.keras import KerasEstimator, KerasModel  # noqa: PLC0415
    from horovod.tensorflow.keras.callbacks import BestModelCheckpoint  # noqa: PLC0415

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    estimator = KerasEstimator(
        num_proc=2,
        model=model,
        optimizer=keras.optimizers.SGD(0.0005),
        loss="mse",
        validation=0.25,
        random_seed=1,
        checkpoint_callback=BestModelCheckpoint(monitor="val_loss", verbose=0, save_freq="epoch"),
        **common,
    )
    fitted = estimator.fit(df)
    fitted.save(f"{folder}/model")
    return {
        "scale_lr": estimator.getScaleLr(),
        "history": {name: len(values) for name, values in fitted.getHistory().items()},
        "loaded": isinstance(KerasModel.load(f"{folder}/model"), KerasModel),
    }


def train_derived(df: DataFrame, folder: str, **common: Any) -> dict[str, object]:
    from tests.spark.horovod_derived import LengthEstimator, LengthModel  # noqa: PLC0415

    words = df.selectExpr("repeat('a', CAST(x AS int)) AS word", "y")
    settings = {name: value for name, value in common.items() if not name.endswith("_cols")}
    estimator = LengthEstimator(backend=SparkBackend(2), validation=0.25, random_seed=1, scale_lr=False, **settings)
    fitted = estimator.fit(words)
    fitted.save(f"{folder}/model")

    def predicted(model: LengthModel) -> list[float]:
        return [row["predicted"] for row in model.transform(words).orderBy("y").collect()]

    return {
        "class": type(fitted).__name__,
        "weight": fitted.getModel().layer.weight.item(),
        "hook": callable(fitted.getModel().validation_epoch_end),
        "history": fitted.getHistory(),
        "predicted": predicted(fitted),
        "loaded": predicted(LengthModel.load(f"{folder}/model")),
    }


def main(folder: str, framework: str) -> None:
    os.environ["OF_THE_DRIVER"] = "here"
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    df = spark.range(16).selectExpr("CAST(id AS float) AS x", "CAST(id AS float) AS y").repartition(2)
    train = {"torch": train_torch, "keras": train_keras, "derived": train_derived}[framework]
    common = {"feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8, "epochs": 1, "verbose": 0}
    print_results(train(df, folder, store=Store.create(f"{folder}/store"), **common))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
