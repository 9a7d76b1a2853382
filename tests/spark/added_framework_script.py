"""Run by test_added_framework.py in a separate process: everything that an estimator of another package does.

Argument: a folder to work in.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy_linear import LinearEstimator, LinearRegression, LinearTransformer
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import DataFrame, SparkSession

from sparkhvd import EarlyStopping, Store
from sparkhvd.errors import SparkHvdError
from tests.scripts import print_results

FOLDER = Path(sys.argv[1])


def refusal(call: Any) -> str:
    try:
        call()
    except SparkHvdError as error:
        return str(error)
    return "accepted"


def predictions(model: Any, df: DataFrame) -> list[float]:
    return [row["y__output"] for row in model.transform(df).orderBy("a").collect()]


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    df = spark.range(64).selectExpr("id / 64 a", "(id % 5) / 5 b", "2 * a - 3 * b + 1 y")
    store = Store.create((FOLDER / "store").as_uri())
    parameters: dict[str, Any] = {
        "model": LinearRegression(2, np.random.default_rng(1)),
        "feature_cols": ["a", "b"],
        "label_cols": ["y"],
        "num_proc": 2,
        "batch_size": 4,
        "epochs": 40,
        "learning_rate": 0.5,
        "random_seed": 3,
        "verbose": 0,
    }
    direct = LinearEstimator(**parameters, halve_rate_on="loss").fit(df)
    kept = LinearEstimator(**parameters, store=store, validation=0.2, resume="auto")
    model = kept.fit(df)
    again = LinearEstimator(**parameters, store=store, validation=0.2, resume="auto", log_weights=True).fit(df)
    other = LinearRegression(2, np.random.default_rng(2))
    new = LinearEstimator(**{**parameters, "model": other, "epochs": 1}, store=store, validation=0.2, resume="auto")

    model.write().save(str(FOLDER / "model"))
    loaded = LinearTransformer.load(str(FOLDER / "model"))
    kept.write().save(str(FOLDER / "estimator"))
    pipeline = Pipeline(stages=[LinearEstimator(**{**parameters, "epochs": 1})]).fit(df)
    pipeline.write().save(str(FOLDER / "pipeline"))
    wrapped = LinearTransformer.from_model(model.get_model(), df, feature_cols=["a", "b"], label_cols=["y"])

    print_results(
        {
            "direct weights": list(direct.get_model().weights),
            "weights": list(model.get_model().weights),
            "epochs": len(model.getHistory()),
            "metrics": sorted(model.getHistory().to_pandas().columns[:2]),
            "run": model.getOrDefault("run_id"),
            "run found again": again.getOrDefault("run_id"),
            "run of other weights": new.fit(df).getOrDefault("run_id"),
            "labels": [row["y"] for row in df.orderBy("a").collect()],
            "predictions": predictions(model, df),
            "loaded": predictions(loaded, df),
            "wrapped": predictions(wrapped, df),
            "with prediction_fn": predictions(loaded.setPredictionFn(lambda model, rows: -model(rows)), df),
            "loaded estimator": LinearEstimator.load(str(FOLDER / "estimator")).getLearningRate(),
            "pipeline": predictions(pipeline, df) == predictions(PipelineModel.load(str(FOLDER / "pipeline")), df),
            "wrong model": refusal(lambda: LinearEstimator(**{**parameters, "model": "linear"}).fit(df)),
            "too few features": refusal(lambda: LinearEstimator(**{**parameters, "feature_cols": ["a"]}).fit(df)),
            "monitored": refusal(lambda: LinearEstimator(**parameters, halve_rate_on="val_loss").fit(df)),
            "unknown metric": refusal(
                lambda: LinearEstimator(**parameters, validation=0.2, early_stopping=EarlyStopping("val_los")).fit(df)
            ),
            "other frameworks": sorted({"torch", "keras", "tensorflow", "lightning"} & sys.modules.keys()),
        }
    )
    spark.stop()
