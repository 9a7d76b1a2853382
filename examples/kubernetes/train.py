"""Train on Kubernetes: train.yaml starts this program as the driver, with two ranks in two executors.

To run it on one machine: python examples/kubernetes/train.py --store sparkhvd-store
"""

from __future__ import annotations

import argparse

import torch
from pyspark.sql import SparkSession

from sparkhvd import Store, TorchEstimator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default="/store/experiments", help="folder or URL of the Store")
    store = Store.create(parser.parse_args().store)

    spark = SparkSession.builder.getOrCreate()  # spark-submit sets the master
    try:
        df = spark.range(2000).selectExpr("id % 20 / 20.0D AS a", "id % 7 / 7.0D AS b", "id % 20 / 10.0D AS y")
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        estimator = TorchEstimator(
            num_proc=2,
            store=store,
            run_id="train-1",  # a restarted driver resumes this run
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
            loss=torch.nn.functional.mse_loss,
            feature_cols=["a", "b"],
            label_cols=["y"],
            validation=0.1,
            batch_size=50,
            epochs=5,
            random_seed=1,
        )
        last = estimator.fit(df).getHistory()[-1]
        print(f"loss {last['train']['loss']:.4f} after {last['epoch'] + 1} epochs")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
