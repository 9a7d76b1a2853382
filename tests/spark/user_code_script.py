"""Run by test_user_code.py in a separate process: trains models whose code is in a user's project.

Arguments: the folder of the project, which this process adds to its import path, and a working folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

PROJECT, FOLDER = sys.argv[1], Path(sys.argv[2])
sys.path.insert(0, PROJECT)
os.environ.setdefault("KERAS_BACKEND", "torch")

import keras  # noqa: E402
import torch  # noqa: E402
from pyspark.sql import DataFrame, SparkSession  # noqa: E402
from scaling import keras_model, lightning_model, modes, torch_model  # noqa: E402

import sparkhvd  # noqa: E402
from sparkhvd import (  # noqa: E402
    KerasEstimator,
    KerasModel,
    LightningEstimator,
    LightningModel,
    TorchEstimator,
    TorchModel,
)
from sparkhvd.driver.user_code import importable  # noqa: E402
from tests.scripts import print_results  # noqa: E402


def estimators() -> dict[str, Any]:
    net = torch_model.Net()
    common = {"feature_cols": ["x"], "label_cols": ["y"], "num_proc": 2, "batch_size": 4, "epochs": 1, "verbose": 0}
    return {
        "torch": TorchEstimator(
            model=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
            loss=torch_model.loss,
            input_shapes=[[-1, 1]],
            transformation_fn=torch_model.seen,
            **common,
        ),
        "lightning": LightningEstimator(model=lightning_model.LitNet(), input_shapes=[[-1, 1]], **common),
        "keras": KerasEstimator(model=keras_model.model(), optimizer=keras.optimizers.SGD(0.0), loss="mse", **common),
    }


def value(model: Any, df: DataFrame) -> float:
    # Spark uses its Python worker again only if all rows are read, so not with first().
    return float(model.transform(df.coalesce(1)).select("y__output").collect()[0][0])


def results(name: str, estimator: Any, df: DataFrame) -> dict[str, object]:
    """Return what a fit, ``transform`` and a saved model compute for 1/64. A duplicated class changes the results."""
    loaded = {"torch": TorchModel, "lightning": LightningModel, "keras": KerasModel}[name]
    function = keras_model.predicted if name == "keras" else torch_model.predicted
    model = estimator.fit(df)
    print(name, file=sys.stderr)
    values: dict[str, object] = {"loss": model.getHistory()[0]["train"]["loss"], "transform": value(model, df)}
    model.setPredictionFn(function)
    values["prediction_fn"] = value(model, df)
    path = str(FOLDER / f"{name}-model")
    model.write().overwrite().save(path)
    again = loaded.load(path)
    values["saved"] = value(again, df)
    again.setPredictionFn(function)
    values["saved, new prediction_fn"] = value(again, df)
    own = again.getModel() if name != "keras" else again.getModel().layers[1]
    kind = {"torch": torch_model.Net, "lightning": lightning_model.LitNet, "keras": keras_model.Scale}[name]
    values["own class"] = isinstance(own, kind)
    return values


def recognized(mode: object, missing: object, kind: type) -> tuple[str, list[bool]]:
    from scaling.modes import Mode as Late  # noqa: PLC0415 - as users do

    same = [mode is modes.Mode.TIMES, mode is Late.TIMES, missing is modes.MISSING, issubclass(kind, torch_model.Scale)]
    return type(modes).__name__, [*same, modes.calls() == modes.CALLS]


class Half(torch_model.Scale):
    pass


if __name__ == "__main__":
    # On a local master, too, Spark's Python workers and the ranks are separate processes.
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.log.level", "ERROR").getOrCreate()
    jobs = []
    ask = importable._ask_executors
    importable._ask_executors = lambda *arguments: jobs.append(1) or ask(*arguments)
    df = spark.range(8).selectExpr("cast(1 / 64 as float) x", "cast(1 as float) y")
    answers: dict[str, Any] = {name: results(name, estimator, df) for name, estimator in estimators().items()}
    answers["run"] = sparkhvd.run(recognized, (modes.Mode.TIMES, modes.MISSING, Half), num_proc=2, spark=spark)
    answers["forward is its module's"] = torch_model.Net.forward.__globals__ is vars(torch_model)
    answers["questions"] = len(jobs)
    print_results(answers)
    spark.stop()
