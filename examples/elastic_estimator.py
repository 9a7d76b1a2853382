"""Train with an estimator on executors that Spark's dynamic allocation adds and removes.

    python examples/elastic_estimator.py --folder elastic

The fit starts with one rank on one executor. It grows when Spark has started the second executor, and would continue
with one rank if that executor were lost. The number of ranks changes neither the rows of a step nor the result. The
data are the 1,797 real 8x8 scans that come with scikit-learn.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import torch
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from sparkhvd import SparkBackend, Store, TorchEstimator

# A cluster has these settings in spark-defaults.conf or gets them from spark-submit.
SETTINGS = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",  # for clusters without an external shuffle service
    "spark.dynamicAllocation.initialExecutors": "1",
    "spark.dynamicAllocation.minExecutors": "1",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.decommission.enabled": "true",  # ranks leave before their executor ends
    "spark.ui.enabled": "false",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--master", default="local-cluster[2,1,1024]", help="of Spark (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=60, help="passes over the rows (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("elastic"), help="where the Store goes")
    options = parser.parse_args()

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(options.master).appName("elastic estimator")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    pixels, digit = load_digits(return_X_y=True)
    rows = [(image.tolist(), int(label)) for image, label in zip(pixels / 16, digit, strict=True)]
    df = spark.createDataFrame(rows, "pixels array<double>, digit long")

    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    estimator = TorchEstimator(
        backend=SparkBackend(1, min_num_proc=1, max_num_proc=2),
        store=Store.create(str(options.folder.absolute() / "store")),
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.002),
        loss=torch.nn.CrossEntropyLoss(),
        feature_cols=["pixels"],
        label_cols=["digit"],
        batch_size=32,  # times num_proc: the rows of a step, which the current ranks divide among themselves
        epochs=options.epochs,
        random_seed=7,
    )
    try:
        train, held_out = df.randomSplit([0.8, 0.2], seed=7)
        trained = estimator.fit(train)
        scores = trained.setOutputCols(["scores"]).transform(held_out).select("digit", "scores").collect()
    finally:
        spark.stop()
    sizes = [size for epoch in trained.getHistory() for size in epoch["sizes"]]
    print("epochs trained:", len(trained.getHistory()))
    print("numbers of ranks, from the first epoch to the last:", *sizes)
    print(f"held-out accuracy: {np.mean([np.argmax(row.scores) == row.digit for row in scores]):.1%}")


if __name__ == "__main__":
    main()
