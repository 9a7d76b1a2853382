"""Train a LightningModule with several ranks on scans of handwritten digits in a Spark DataFrame.

    python examples/lightning_digits.py --num-proc 2

Lightning's own callbacks stop the training and choose the best epoch by the validation accuracy over the rows of all
ranks. The data are the 1,797 real 8x8 scans that come with scikit-learn.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import lightning.pytorch as lightning
import numpy as np
import pandas as pd
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from sparkhvd import LightningEstimator

FULL_SIZE = 1797
SEED = 7


class Digits(lightning.LightningModule):
    """A small convolutional network for 8x8 scans."""

    def __init__(self, channels: int = 16, learning_rate: float = 0.004) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * channels * 4 * 4, 10),
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layers(pixels)

    def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch["pixels"]), batch["digit"])

    def validation_step(self, batch: dict[str, torch.Tensor], _index: int) -> None:
        scores = self(batch["pixels"])
        self.accuracy(scores, batch["digit"])
        self.log("val_loss", nn.functional.cross_entropy(scores, batch["digit"]))
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)}


def main() -> int:
    options = parse_options()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("sparkhvd").setLevel(logging.INFO)
    train, held_out = split(options.rows)
    spark = start_spark(options.num_proc)
    try:
        torch.manual_seed(SEED)
        model = LightningEstimator(
            num_proc=options.num_proc,
            model=Digits(),
            feature_cols=["pixels"],
            label_cols=["digit"],
            input_shapes=[[-1, 1, 8, 8]],
            validation="validate",
            callbacks=[
                ModelCheckpoint(monitor="val_accuracy", mode="max"),
                EarlyStopping("val_accuracy", mode="max", patience=5),
            ],
            logger=CSVLogger("logs"),
            trainer_args={"gradient_clip_val": 1.0, "log_every_n_steps": 10},
            batch_size=16,
            epochs=options.epochs,
            random_seed=SEED,
        ).fit(spark.createDataFrame(train))
        scores = model.setOutputCols(["scores"]).transform(spark.createDataFrame(held_out)).select("scores").toPandas()
    finally:
        spark.stop()
    options.folder.mkdir(parents=True, exist_ok=True)
    model.save_checkpoint(str(options.folder / "digits.ckpt"))
    written = model.save_logs(str(options.folder))
    saved = Digits.load_from_checkpoint(options.folder / "digits.ckpt")
    predicted = np.stack(scores["scores"].map(np.asarray).to_list()).argmax(axis=1)
    print(f"epochs trained:       {len(model.getHistory())}")
    print(f"held-out accuracy:    {float((predicted == held_out['digit'].to_numpy()).mean()):.4f}")
    print(
        f"checkpoint:           {options.folder / 'digits.ckpt'} ({sum(p.numel() for p in saved.parameters())} weights)"
    )
    print(f"logs:                 {', '.join(sorted(written))}")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the rows (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=FULL_SIZE, help="scans to use (default: all %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("lightning-digits"), help="where all files go")
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


def start_spark(slots: int) -> SparkSession:
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(f"local[{slots}]").appName("digits").config("spark.ui.enabled", "false")
    return builder.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "ERROR").getOrCreate()


if __name__ == "__main__":
    sys.exit(main())
