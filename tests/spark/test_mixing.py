"""The batches of each rank if the labels of the DataFrame are sorted or alternate."""

from __future__ import annotations

import os
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from sparkhvd import Store, TorchEstimator
from sparkhvd.errors import ParamError

pytestmark = pytest.mark.spark

ROWS, BATCH = 2000, 50
LABELS = {"sorted": f"CAST(id >= {ROWS // 2} AS DOUBLE)", "alternating": "CAST(id % 2 AS DOUBLE)"}


def noted(folder, columns):
    """Write the number of rows with label 1 to a file, and return the columns."""
    if len(columns["y"]) == BATCH:
        with Path(folder, str(os.getpid())).open("a") as notes:
            notes.write(f"{int(columns['y'].sum())}\n")
    return columns


def shares_of_label_1(folder):
    """Return the shares of label 1 in the full batches, by rank."""
    shares_by_rank = defaultdict(list)
    for path in Path(folder).iterdir():
        shares_by_rank[path.name] += [int(line) / BATCH for line in path.read_text().split()]
    return [np.array(shares) for shares in shares_by_rank.values() if len(shares) > 1]


def rows_of(spark, labels):
    # One partition, so that Spark's partitioning mixes no rows.
    return spark.range(ROWS, numPartitions=1).selectExpr(f"id / {ROWS}D AS x", f"{LABELS[labels]} AS y")


def estimator(folder, **more):
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    folder.mkdir()
    params = dict(  # noqa: C408  (shorter)
        num_proc=2,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=BATCH,
        epochs=1,
        random_seed=3,
        verbose=0,
        transformation_fn=partial(noted, str(folder)),
    )
    return TorchEstimator(**{**params, **more})


def assert_fair(folder):
    ranks = shares_of_label_1(folder)
    assert len(ranks) == 2
    for shares in ranks:
        assert len(shares) >= ROWS // BATCH // 2 - 1
        assert abs(shares.mean() - 0.5) < 0.08
        assert np.abs(shares - 0.5).max() < 0.35, "a batch of nearly one class"


@pytest.mark.parametrize("labels", ["sorted", pytest.param("alternating", marks=pytest.mark.soak)])
def test_every_batch_of_every_rank_has_all_classes_through_a_store(spark, tmp_path, labels):
    estimator(tmp_path / "notes", store=Store.create(str(tmp_path / "store"))).fit(rows_of(spark, labels))
    assert_fair(tmp_path / "notes")


@pytest.mark.parametrize("labels", ["sorted", pytest.param("alternating", marks=pytest.mark.soak)])
def test_every_batch_of_every_rank_has_all_classes_without_a_store(spark, tmp_path, labels):
    setting = "spark.sql.execution.sortBeforeRepartition"
    spark.conf.set(setting, "false")
    try:
        estimator(tmp_path / "notes").fit(rows_of(spark, labels))
        assert spark.conf.get(setting) == "false"
    finally:
        spark.conf.unset(setting)
    assert_fair(tmp_path / "notes")


@pytest.mark.parametrize("stored", [False, True], ids=["direct", "through a Store"])
def test_a_last_batch_of_one_row_does_not_end_a_training_with_batch_normalization(spark, tmp_path, stored, caplog):
    store = Store.create(str(tmp_path / "store")) if stored else None
    rows = rows_of(spark, "sorted").limit(2 * 24 + 1)  # 25 and 24 rows in batches of 8
    trained = estimator(tmp_path / "notes", store=store, batch_size=8, epochs=2).fit(rows)
    assert len(trained.getHistory()) == 2
    messages = [record.getMessage() for record in caplog.records if "SyncBatchNorm" in record.getMessage()]
    assert len(messages) == 1
    assert "(1) sees the 8 rows of its own rank, not the 16 rows of all 2 ranks" in messages[0]


def test_batches_of_one_row_are_refused_before_a_training_with_batch_normalization(spark, tmp_path):
    with pytest.raises(ParamError, match=r"With batch_size=1 and 2 ranks, a batch has a single row, .* \(1\) cannot"):
        estimator(tmp_path / "notes", batch_size=1).fit(rows_of(spark, "sorted").limit(20))
