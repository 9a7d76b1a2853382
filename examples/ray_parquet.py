"""Train on Parquet files with two ranks on Ray, without a Spark session.

    python examples/ray_parquet.py --epochs 5

The data are scikit-learn's scans of handwritten digits. Without RAY_ADDRESS, Ray runs on this machine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import pyarrow as pa
import torch
from pyarrow import parquet
from sklearn.datasets import load_digits

import sparkhvd

RANKS = 2
TRAIN_ROWS = 1500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5, help="passes over the rows (default: %(default)s)")
    parser.add_argument("--folder", help="where the Parquet files are written; every Ray node must share it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.folder or folder, "digits.parquet")
        pixels, digit = write_rows(path)
        model = train(path, options.epochs)
    with torch.no_grad():
        guesses = model(pixels).argmax(dim=1)
    print(f"held-out accuracy, {RANKS} ranks: {float((guesses == digit).float().mean()):.1%}")


def write_rows(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the rows for the training to a file, and return the held-out ones."""
    pixels, digit = load_digits(return_X_y=True)
    pixels = (pixels / 16).astype("float32")
    parquet.write_table(pa.table({"pixels": list(pixels[:TRAIN_ROWS]), "digit": digit[:TRAIN_ROWS]}), path)
    return torch.tensor(pixels[TRAIN_ROWS:]), torch.tensor(digit[TRAIN_ROWS:])


def train(path: Path, epochs: int) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    estimator = sparkhvd.TorchEstimator(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=torch.nn.functional.cross_entropy,
        feature_cols=["pixels"],
        label_cols=["digit"],
        batch_size=32,
        epochs=epochs,
        num_proc=RANKS,
        backend="ray",
    )
    return estimator.fit_on_parquet(path=str(path)).getModel()


if __name__ == "__main__":
    main()
