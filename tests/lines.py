"""A minimal training with a visible result: a model with two parameters learns a line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sparkhvd import Store, TorchEstimator

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def points(spark: SparkSession, *more: str) -> DataFrame:
    """Return 64 rows of the line ``y = 3 * x + 1`` for x from 0 to 1, with the columns ``more``."""
    return spark.range(0, 64, 1, 2).selectExpr("id / 64.0D AS x", *more, "3 * id / 64.0D + 1 AS y")


def estimator(store: Store | None, **more: Any) -> TorchEstimator:
    """Return an estimator with two ranks that approximately learns the line in ten epochs."""
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1)
    params = {
        "num_proc": 2,
        "store": store,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.3),
        "loss": torch.nn.functional.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 10,
        "random_seed": 1,
        "verbose": 0,
    }
    return TorchEstimator(**{**params, **more})


def errors(spark: SparkSession, store: Store | None, **more: Any) -> list[float]:
    """Train an estimator, and return the error of the learned line for each row."""
    df = points(spark)
    rows = estimator(store, **more).fit(df).transform(df).select("y", "y__output").collect()
    return [abs(row.y - row.y__output) for row in rows]
