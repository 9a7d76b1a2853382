"""Run by test_estimators.py in a separate process: a Spark that gives its tasks the GPUs of this machine.

python -m tests.gpu.spark_script DISCOVERY_SCRIPT GPUS
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from pyspark.sql import DataFrame, SparkSession

from sparkhvd import KerasEstimator
from sparkhvd.estimators.torch import TorchCallback
from tests import lines
from tests.scripts import print_results


class OnGpu(TorchCallback):
    """Fails the fit of a rank that does not train on a GPU."""

    def on_epoch_end(self, run, epoch, logs):
        devices = {parameter.device.type for parameter in run.model.parameters()}
        assert devices == {"cuda"}, f"rank {run.rank} trains on {devices}"


def predict_on_gpu(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    device = next(model.parameters()).device
    assert device.type == "cuda", f"the model predicts on {device}"
    return model(x)


def error(transformed: DataFrame) -> float:
    """Return the largest error of the predictions."""
    return max(abs(row.y - row.y__output) for row in transformed.select("y", "y__output").collect())


def keras_error(df: DataFrame, ranks: int) -> float:
    import keras  # noqa: PLC0415 - it loads TensorFlow, which the other trainings do without

    given: dict[str, Any] = {"feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8, "epochs": 10, "verbose": 0}
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.3)
    estimator = KerasEstimator(model=model, optimizer=optimizer, loss="mse", num_proc=ranks, random_seed=1, **given)
    return error(estimator.fit(df).transform(df))


def main(script: str, gpus: int) -> None:
    builder = SparkSession.builder.master(f"local-cluster[1,{2 * gpus},2048]").config("spark.executor.memory", "1g")
    for who in ("worker", "executor"):
        builder.config(f"spark.{who}.resource.gpu.amount", str(gpus))
        builder.config(f"spark.{who}.resource.gpu.discoveryScript", script)
    builder.config("spark.task.resource.gpu.amount", "0.5")  # preparation and prediction share a GPU
    session = builder.config("spark.ui.enabled", "false").config("spark.log.level", "ERROR").getOrCreate()
    try:
        df = lines.points(session)
        results: dict[str, object] = {}
        for way in ("staged", "nccl"):
            os.environ["SPARKHVD_GPU_OPERATIONS"] = way
            ranks = 1 if way == "nccl" and gpus == 1 else 2
            results[f"torch, {way}"] = max(lines.errors(session, None, num_proc=ranks, callbacks=[OnGpu()]))
            results[f"keras, {way}"] = keras_error(df, ranks)
        fitted = lines.estimator(None, num_proc=1).fit(df)
        results["transform"] = error(fitted.setPredictionFn(predict_on_gpu).setOutputTypes(["double"]).transform(df))
    finally:
        session.stop()
    print_results(results)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
