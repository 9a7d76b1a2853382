"""Tells from a few words which page of Python's documentation they come from, with an embedding of words in PyTorch.

    python examples/documentation.py --num-proc 2

The data are the texts behind Python's own ``help()``: passages of its longest pages, held in a Spark DataFrame.
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

import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from sparkhvd import TorchEstimator

PAGES = ("compound", "formatstrings", "types", "typesseq", "debugger")
WORDS_PER_PASSAGE = 12
VOCABULARY = 5000


class BagOfWords(torch.nn.Module):
    """The average of the words' embeddings, and one layer over it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = torch.nn.EmbeddingBag(VOCABULARY, 32)
        self.page = torch.nn.Linear(32, len(PAGES))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.page(self.words(words))
        return scores


def accuracy(scores: torch.Tensor, page: torch.Tensor) -> torch.Tensor:
    return (scores.argmax(dim=1) == page).float().mean()


def main() -> int:
    options = parse_options()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("sparkhvd").setLevel(logging.INFO)
    spark = start_spark(options.num_proc, options.folder)
    try:
        train, held_out = passages(spark).randomSplit([0.8, 0.2], seed=5)
        network = BagOfWords()
        model = TorchEstimator(
            num_proc=options.num_proc,
            model=network,
            optimizer=torch.optim.Adam(network.parameters(), lr=0.01),
            loss=torch.nn.functional.cross_entropy,
            metrics=[accuracy],
            feature_cols=["words"],
            label_cols=["page"],
            batch_size=16,
            epochs=options.epochs,
            random_seed=5,
        ).fit(train)
        # The likeliest page itself, in the type of the label.
        predicted = model.setOutputCols(["predicted"]).setOutputTypes(["label"]).transform(held_out).cache()
        predicted.select("text", "page", "predicted").show(5, truncate=60)
        right, total = predicted.where("page = predicted").count(), predicted.count()
        print(f"{right} of {total} held-out passages are found ({right / total:.0%}; by chance {1 / len(PAGES):.0%})")
    finally:
        spark.stop()
    return 0


def passages(spark: SparkSession) -> DataFrame:
    """Every dozen words of the pages, with numbers in place of the words."""
    rows = []
    for page, name in enumerate(PAGES):
        words = re.findall(r"[a-z_]{2,}", topics.topics[name].lower())
        for start in range(0, len(words) - WORDS_PER_PASSAGE + 1, WORDS_PER_PASSAGE):
            passage = words[start : start + WORDS_PER_PASSAGE]
            numbers = [zlib.crc32(word.encode()) % VOCABULARY for word in passage]
            rows.append((" ".join(passage), numbers, page))
    return spark.createDataFrame(rows, "text string, words array<int>, page int").orderBy(sql.hash("text"))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
