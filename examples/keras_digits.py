"""Train a Keras network with several ranks on scans of handwritten digits in a Spark DataFrame.

    python examples/keras_digits.py --num-proc 2

Callbacks lower the learning rate by the validation loss and choose the best epoch by the validation accuracy, both over
the rows of all ranks. The data are the 1,797 real 8x8 scans that come with scikit-learn.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import keras
import numpy as np
import pandas as pd
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

import sparkhvd.keras as hvd
from sparkhvd import KerasEstimator

FULL_SIZE = 1797
SEED = 7


def network() -> keras.Model:
    """Return a small convolutional network for 8x8 scans, with 64 brightness values per row."""
    keras.utils.set_random_seed(SEED)
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def main() -> int:
    options = parse_options()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("sparkhvd").setLevel(logging.INFO)
    train, held_out = split(options.rows)
    spark = start_spark(options.num_proc, options.folder)
    try:
        model = KerasEstimator(
            num_proc=options.num_proc,
            model=network(),
            optimizer=keras.optimizers.Adam(0.004),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
            feature_cols=["pixels"],
            label_cols=["digit"],
            validation="validate",
            callbacks=[keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=3)],
            checkpoint_callback=hvd.callbacks.BestModelCheckpoint(monitor="val_accuracy"),
            batch_size=16,
            epochs=options.epochs,
            random_seed=SEED,
        ).fit(spark.createDataFrame(train))
        rows = model.setOutputCols(["predicted"]).setOutputTypes(["label"]).transform(spark.createDataFrame(held_out))
        predicted = rows.select("predicted").toPandas()["predicted"].to_numpy()
    finally:
        spark.stop()
    # The file opens without Spark and without sparkhvd.
    model.getModel().save(options.folder / "digits.keras")
    loaded = keras.saving.load_model(options.folder / "digits.keras")
    pixels, truth = np.stack(held_out["pixels"].to_list()), held_out["digit"].to_numpy()
    by_keras = loaded.predict(pixels.astype(np.float32), verbose=0).argmax(axis=1)
    averages = np.stack([np.stack(train["pixels"][train["digit"] == digit]).mean(axis=0) for digit in range(10)])
    nearest = ((pixels[:, None] - averages) ** 2).sum(axis=2).argmin(axis=1)
    print(model.getHistory().to_pandas()[["loss", "val_loss", "val_accuracy"]].round(3).to_string())
    print(f"held-out accuracy, the nearest average scan:       {(nearest == truth).mean():.4f}")
    print(f"held-out accuracy, the network in transform:       {(predicted == truth).mean():.4f}")
    print(f"held-out accuracy, {options.folder / 'digits.keras'} in plain Keras: {(by_keras == truth).mean():.4f}")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the rows (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=FULL_SIZE, help="scans to use (default: all %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("keras-digits"), help="where all files go")
    return parser.parse_args()


def split(rows: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return four fifths of the scans, a tenth of them for validation, and the held-out fifth.

    A row has 64 brightness values and a label.
    """
    digits = load_digits()
    order = np.random.default_rng(SEED).permutation(len(digits.target))[:rows]
    frame = pd.DataFrame(
        {
            "pixels": [scan.tolist() for scan in (digits.data[order] / 16.0).astype(np.float32)],
            "digit": digits.target[order].astype(np.int64),
        }
    )
    frame["validate"] = np.arange(len(frame)) % 10 == 0
    cut = len(frame) * 4 // 5
    return frame[:cut], frame[cut:]


def start_spark(slots: int, folder: Path) -> SparkSession:
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    folder.mkdir(parents=True, exist_ok=True)
    return (
        SparkSession.builder.master(f"local[{slots}]")
        .appName("digits")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.local.dir", str(folder / "spark"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )


if __name__ == "__main__":
    sys.exit(main())
