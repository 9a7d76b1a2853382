"""Train a scikit-learn classifier on several ranks, which average their weights after every epoch.

    python examples/scikit_learn_digits.py --num-proc 2

Each rank passes its own rows to ``partial_fit``. The average of linear models is a linear model, too.
"""

from __future__ import annotations

import argparse

import numpy as np
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

import sparkhvd
import sparkhvd.numpy as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the rows (default: %(default)s)")
    options = parser.parse_args()

    pixels, digit = load_digits(return_X_y=True)
    spark = SparkSession.builder.master(f"local[{options.num_proc}]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        models = sparkhvd.run(train, (options.epochs,), num_proc=options.num_proc)
    finally:
        spark.stop()
    accuracy = models[0].score(pixels[1500:] / 16, digit[1500:])
    print(f"the ranks have the same model: {all(np.array_equal(models[0].coef_, model.coef_) for model in models)}")
    print(f"held-out accuracy, {options.num_proc} ranks: {accuracy:.1%}")


def train(epochs: int) -> SGDClassifier:
    """Run on every rank; return the model that all ranks have at the end."""
    hvd.init()
    pixels, digit = load_digits(return_X_y=True)
    rows_of_rank = slice(hvd.rank(), 1500, hvd.size())
    model = SGDClassifier(loss="log_loss", random_state=hvd.rank())
    for _ in range(epochs):
        model.partial_fit(pixels[rows_of_rank] / 16, digit[rows_of_rank], classes=range(10))
        model.coef_, model.intercept_ = hvd.grouped_allreduce([model.coef_, model.intercept_])
    return model


if __name__ == "__main__":
    main()
