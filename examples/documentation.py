"""Classify passages of Python's documentation by the page that they come from, with word embeddings.

    python examples/documentation.py --framework torch lightning keras

The data are passages from five long pages of Python's own ``help()``, in a Spark DataFrame. A framework is imported
only in the functions that use it, so you need only one of the three.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import zlib
from pathlib import Path
from pydoc_data import topics
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession

from sparkhvd import KerasEstimator, LightningEstimator, TorchEstimator

if TYPE_CHECKING:
    import torch

PAGES = ("compound", "formatstrings", "types", "typesseq", "debugger")
WORDS_PER_PASSAGE = 12
VOCABULARY = 5000
WIDTH = 32  # size of the embedding of a word


def main() -> int:
    options = parse_options()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("sparkhvd").setLevel(logging.INFO)
    spark = start_spark(options.num_proc, options.folder)
    try:
        rows = passages(spark)
        train, held_out = rows.where("abs(hash(text)) % 5 > 0"), rows.where("abs(hash(text)) % 5 = 0")
        # The parameters of all three estimators. Each function below adds those of one framework.
        common = {
            "num_proc": options.num_proc,
            "feature_cols": ["words"],
            "label_cols": ["page"],
            "output_cols": ["predicted"],
            "output_types": ["label"],  # the most likely page, in the type of the label
            "validation": 0.1,
            "batch_size": 16,
            "epochs": options.epochs,
            "random_seed": 5,
        }
        longest = max(row["count"] for row in held_out.groupBy("page").count().collect())
        correct, total = {"always the longest page": longest}, held_out.count()
        # Keras comes last: TensorFlow must be imported after the modules that PyTorch's optimizers import.
        for framework in sorted(options.framework, key=list(ESTIMATORS).index):
            model = ESTIMATORS[framework](common).fit(train)
            predicted = model.transform(held_out).cache()
            predicted.select("text", "page", "predicted").show(5, truncate=60)
            correct[framework] = predicted.where("page = predicted").count()
    finally:
        spark.stop()
    for name, count in correct.items():
        print(f"{name + ':':<25} {count} of {total} held-out passages are classified correctly ({count / total:.0%})")
    return 0


def torch_estimator(common: dict[str, Any]) -> TorchEstimator:
    import torch

    def accuracy(scores: torch.Tensor, page: torch.Tensor) -> torch.Tensor:
        return (scores.argmax(dim=1) == page).float().mean()

    network = torch_network()
    return TorchEstimator(
        model=network,
        optimizer=torch.optim.Adam(network.parameters(), lr=0.01),
        loss=torch.nn.functional.cross_entropy,
        metrics=[accuracy],
        **common,
    )


def torch_network() -> torch.nn.Module:
    """Return a linear layer on top of the average of the words' embeddings."""
    import torch

    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.EmbeddingBag(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, len(PAGES)))


def lightning_estimator(common: dict[str, Any]) -> LightningEstimator:
    import lightning.pytorch as lightning
    import torch
    from torchmetrics.classification import MulticlassAccuracy

    class Pages(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = torch_network()
            self.accuracy = MulticlassAccuracy(len(PAGES), average="micro")

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.network(words)

        def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self(batch["words"]), batch["page"])

        def validation_step(self, batch: dict[str, torch.Tensor], _index: int) -> None:
            scores = self(batch["words"])
            self.accuracy(scores, batch["page"])
            self.log("val_loss", torch.nn.functional.cross_entropy(scores, batch["page"]))
            self.log("val_accuracy", self.accuracy)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return LightningEstimator(model=Pages(), **common)


def keras_estimator(common: dict[str, Any]) -> KerasEstimator:
    import keras

    keras.utils.set_random_seed(5)
    network = keras.Sequential(
        [
            keras.Input((WORDS_PER_PASSAGE,), dtype="int32"),
            keras.layers.Embedding(VOCABULARY, WIDTH),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(len(PAGES), activation="softmax"),
        ]
    )
    return KerasEstimator(
        model=network,
        optimizer=keras.optimizers.Adam(0.02),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        **common,
    )


ESTIMATORS = {"torch": torch_estimator, "lightning": lightning_estimator, "keras": keras_estimator}


def passages(spark: SparkSession) -> DataFrame:
    """Return passages of 12 words, with the ids of the words and the number of the page."""
    rows = []
    for page, name in enumerate(PAGES):
        words = re.findall(r"[a-z_]{2,}", topics.topics[name].lower())
        for start in range(0, len(words) - WORDS_PER_PASSAGE + 1, WORDS_PER_PASSAGE):
            passage = words[start : start + WORDS_PER_PASSAGE]
            numbers = [zlib.crc32(word.encode()) % VOCABULARY for word in passage]
            rows.append((" ".join(passage), numbers, page))
    return spark.createDataFrame(rows, "text string, words array<int>, page int")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", nargs="+", choices=ESTIMATORS, default=["torch"], help="one or more")
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the rows (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("documentation"), help="where all files go")
    return parser.parse_args()


def start_spark(slots: int, folder: Path) -> SparkSession:
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    return (
        SparkSession.builder.master(f"local[{slots}]")
        .appName("documentation")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", slots)
        .config("spark.local.dir", str(folder / "spark"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )


if __name__ == "__main__":
    sys.exit(main())
