"""Run by test_keras_estimator.py in a separate process: Keras chooses its backend once, when it is imported."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
from pyspark.sql import SparkSession

import sparkhvd.keras as hvd
from sparkhvd import KerasEstimator, KerasModel, Store
from tests.scripts import print_results

ROWS, EPOCHS = 37, 3  # an odd number of rows, so that the second of two ranks has fewer


class BackendCheck(keras.callbacks.Callback):
    """Check that every rank uses the PyTorch backend."""

    def on_train_begin(self, logs=None):
        assert keras.config.backend() == "torch"
        assert hvd.size() == 2


def network():
    keras.utils.set_random_seed(1)
    layers = [keras.Input((2,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def adam():
    return keras.optimizers.Adam(0.05)


def estimator(**more):
    """Return an estimator whose epoch is one step over all rows, however the ranks share them."""
    params = {
        "num_proc": 2,
        "optimizer": adam(),
        "loss": "mse",
        "metrics": ["mae"],
        "feature_cols": ["a", "b"],
        "label_cols": ["y"],
        "batch_size": 20,
        "epochs": EPOCHS,
        "random_seed": 5,
        "verbose": 0,
    }
    return KerasEstimator(**{**params, **more})


def distance(model, expected):
    """Return the largest difference between the weights of two models."""
    pairs = zip(model.get_weights(), expected.get_weights(), strict=True)
    return float(max(np.abs(weights - reference).max() for weights, reference in pairs))


def outputs(model, df):
    return [row["y__output"] for row in model.transform(df).orderBy("a").collect()]


def fit_results(spark: SparkSession, folder: Path) -> dict[str, object]:
    df = spark.range(ROWS).selectExpr(f"id / {ROWS}.0D AS a", "id % 7 / 7.0D AS b", "a * 2 - b AS y").coalesce(2)
    rows = np.array(df.orderBy("a").collect(), np.float32)
    reference, initial = network(), network()
    reference.compile(adam(), "mse")
    for _ in range(EPOCHS):
        reference.train_on_batch(rows[:, :2], rows[:, 2:])
    first_fit = estimator(model=network(), epochs=1).fit(df)  # without a Store
    store = Store.create(str(folder / "store"))
    second_estimator = estimator(
        model=first_fit.getModel(), optimizer=None, epochs=EPOCHS - 1, store=store, callbacks=[BackendCheck()]
    )
    second_fit = second_estimator.fit(df)
    predicted = outputs(second_fit, df)
    second_fit.save(str(folder / "saved"))
    return {
        "moved": distance(initial, reference),
        "difference": distance(second_fit.getModel(), reference),
        "transform": float(np.abs(second_fit.getModel().predict(rows[:, :2], verbose=0)[:, 0] - predicted).max()),
        "loaded": outputs(KerasModel.load(str(folder / "saved")), df) == predicted,
        "history": second_fit.getHistory(),
    }


def main() -> None:
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.log.level", "ERROR").config("spark.sql.shuffle.partitions", "1").getOrCreate()
    try:
        results = fit_results(spark, Path.cwd())
    finally:
        spark.stop()
    print_results(results)


if __name__ == "__main__":
    main()
