"""Train a small convolutional network with several ranks on scans of handwritten digits in a Spark DataFrame.

    python examples/digits.py --num-proc 2

Plain PyTorch then trains the same network in one process, with the same rows and the same global batch, and reaches
about the same accuracy. The data are the 1,797 real 8x8 scans that come with scikit-learn.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # draws into files and needs no screen
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from matplotlib import pyplot
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import nn

from sparkhvd import TorchEstimator, TorchModel

FULL_SIZE = 1797
ACCURACY_BAR = 0.97
BATCH_PER_RANK = 16
LEARNING_RATE = 0.004
SEED = 7


def network() -> nn.Module:
    """Return three convolutions and a linear layer, with the same initial weights on every call."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def loss() -> nn.Module:
    return nn.CrossEntropyLoss(label_smoothing=0.1)


def accuracy(output: torch.Tensor, digit: torch.Tensor) -> torch.Tensor:
    return (output.argmax(dim=1) == digit).float().mean()


def main() -> int:
    options = parse_options()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("sparkhvd").setLevel(logging.INFO)
    options.folder.mkdir(parents=True, exist_ok=True)

    train, held_out = split(options.rows)
    print(f"{len(train)} scans of handwritten digits to train on, {len(held_out)} held out.")
    print(f"Starting Spark; its log is {options.folder / 'spark.log'}.", flush=True)
    spark = start_spark(options.num_proc, options.folder)
    try:
        print_title(f"Training on Spark with {options.num_proc} ranks, {BATCH_PER_RANK} rows each per step")
        started = time.monotonic()
        model = fit(spark.createDataFrame(train), options)
        spark_seconds = time.monotonic() - started
        predicted = predict(model, spark.createDataFrame(held_out))
        history = model.getHistory()
    finally:
        spark.stop()

    print_title("Training the same network with plain PyTorch in one process")
    started = time.monotonic()
    plain = train_with_plain_torch(train[~train["validate"]], options.epochs, BATCH_PER_RANK * options.num_proc)
    plain_predicted = predict_with_plain_torch(plain, held_out)
    plain_seconds = time.monotonic() - started

    truth = held_out["digit"].to_numpy()
    score, plain_score = float((predicted == truth).mean()), float((plain_predicted == truth).mean())
    show_predictions(held_out, predicted)
    picture = draw(history, options.folder / "training.png")
    print_title("Result")
    print(f"held-out accuracy, {options.num_proc} ranks on Spark:    {score:.4f}   ({spark_seconds:.0f} s)")
    print(f"held-out accuracy, plain PyTorch:       {plain_score:.4f}   ({plain_seconds:.0f} s)")
    print(f"loss and accuracy by epoch:             {picture}")
    print(f"{len(train)} rows are too few to gain from ranks: most of the time on Spark goes into starting processes.")
    print(f"Both read the rows in different orders, so they may differ in a few of the {len(held_out)} held-out scans.")
    print("Smoothed labels, 0.91 for the right digit and 0.01 for each other one, keep the loss above 0.50.")
    if options.rows == FULL_SIZE and score < ACCURACY_BAR:
        print(f"The accuracy is below {ACCURACY_BAR}.", file=sys.stderr)
        return 1
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the rows (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=FULL_SIZE, help="scans to use (default: all %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("quickstart"), help="where all files go")
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
    """Start Spark in local mode, with its files and its log in ``folder``."""
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = (
        SparkSession.builder.master(f"local[{slots}]")
        .appName("digits")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.local.dir", str(folder / "spark"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
    )
    with stderr_into(folder / "spark.log"):
        return builder.getOrCreate()


@contextmanager
def stderr_into(path: Path) -> Iterator[None]:
    """Redirect the stderr of processes that start within the context, such as Spark's JVM, into a file."""
    own = os.dup(2)
    try:
        with path.open("w") as file:
            os.dup2(file.fileno(), 2)
        yield
    except Exception as error:
        error.add_note(f"See {path} for details.")
        raise
    finally:
        os.dup2(own, 2)
        os.close(own)


def fit(train: DataFrame, options: argparse.Namespace) -> TorchModel:
    model = network()
    estimator = TorchEstimator(
        num_proc=options.num_proc,
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=LEARNING_RATE),
        loss=loss(),
        metrics=[accuracy],
        input_shapes=[[-1, 1, 8, 8]],
        feature_cols=["pixels"],
        label_cols=["digit"],
        validation="validate",
        batch_size=BATCH_PER_RANK,
        epochs=options.epochs,
        random_seed=SEED,
        verbose=1,
    )
    return estimator.fit(train)


def predict(model: TorchModel, rows: DataFrame) -> npt.NDArray[np.int64]:
    """Return the most likely digit of every row, in the order of ``rows``."""
    predictions = model.setOutputCols(["scores"]).transform(rows).select("scores").toPandas()
    return np.stack(predictions["scores"].map(np.asarray).to_list()).argmax(axis=1)


def train_with_plain_torch(train: pd.DataFrame, epochs: int, batch: int) -> nn.Module:
    """Train with an ordinary PyTorch loop. One thread is the fastest for such a small network."""
    torch.set_num_threads(1)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    measure = loss()
    images, digit = as_images(train), torch.tensor(train["digit"].to_numpy())
    for _ in range(epochs):
        for rows in torch.randperm(len(digit)).split(batch):
            optimizer.zero_grad()
            measure(model(images[rows]), digit[rows]).backward()
            optimizer.step()
    return model


def as_images(rows: pd.DataFrame) -> torch.Tensor:
    return torch.tensor(np.stack(rows["pixels"].map(np.asarray).to_list()), dtype=torch.float32).reshape(-1, 1, 8, 8)


def predict_with_plain_torch(model: nn.Module, rows: pd.DataFrame) -> npt.NDArray[np.int64]:
    with torch.no_grad():
        digits: npt.NDArray[np.int64] = model(as_images(rows)).argmax(dim=1).numpy()
    return digits


def show_predictions(rows: pd.DataFrame, predicted: npt.NDArray[np.int64], count: int = 5) -> None:
    """Print a few scans side by side as characters, with the predicted digits."""
    print_title("A few of the held-out scans")
    shades = " .:-=+*#%@"
    scans = np.stack(rows["pixels"][:count].map(np.asarray).to_list()).reshape(-1, 8, 8)
    for y in range(8):
        print("   ".join("".join(shades[round(float(v) * 9)] * 2 for v in scan[y]) for scan in scans))
    truth = rows["digit"].to_numpy()
    labels = [f"predicted {p}, is {t}" for p, t in zip(predicted[:count], truth[:count], strict=True)]
    print("   ".join(f"{label:<16}" for label in labels))


def draw(history: list[dict[str, Any]], path: Path) -> Path:
    """Plot the loss and the accuracy of the training and validation rows by epoch; return the path of the plot."""
    epochs = [record["epoch"] + 1 for record in history]
    figure, (losses, accuracies) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for part in ("train", "validation"):
        losses.plot(epochs, [record[part]["loss"] for record in history], label=part)
        accuracies.plot(epochs, [record[part]["all_metrics"][0]["accuracy"] for record in history], label=part)
    losses.set(title="loss", xlabel="epoch")
    accuracies.set(title="accuracy", xlabel="epoch")
    losses.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def print_title(title: str) -> None:
    print(f"\n{title}\n{'-' * len(title)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
