"""Training without a Store: Spark sends the rows to the ranks, and the model returns with the results."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions
from torch.nn import functional

import sparkhvd
from sparkhvd import Store, TorchEstimator
from sparkhvd.config import given_rows
from sparkhvd.data.prepare.direct_rows import partition_for_ranks
from sparkhvd.data.read.blocks import ArrowBlocks
from sparkhvd.data.schema.selection import select
from sparkhvd.errors import DataError, ModelOutputError, ParamError, RankFailedError, SchemaError
from sparkhvd.store import layout

pytestmark = pytest.mark.spark

ROWS = 203


@pytest.fixture(scope="module")
def df(spark):
    """Return points of a plane, with one array column, in the same order in every evaluation."""
    return spark.range(ROWS, numPartitions=3).selectExpr(
        "array(id / 100.0D, id % 7 / 7.0D) AS x", "id / 50.0D - id % 7 / 7.0D AS y", "id % 10 = 0 AS held_out"
    )


def network(inputs=2):
    torch.manual_seed(4)
    return torch.nn.Linear(inputs, 1)


def estimator(**more):
    model = more.pop("model", None) or network()
    params = {
        "num_proc": 2,
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.05),
        "loss": functional.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 8,
        "random_seed": 3,
        "verbose": 0,
    }
    return TorchEstimator(**{**params, **more})


def weights(trained):
    return torch.cat([parameter.detach().flatten() for parameter in trained.getModel().parameters()])


def in_partitions(rows, columns):
    """Return the rows of every partition, in order."""
    numbered = rows.select(functions.spark_partition_id().alias("part"), *columns).collect()
    return {part: [tuple(row)[1:] for row in numbered if row.part == part] for part in {row.part for row in numbered}}


@pytest.fixture(scope="module")
def fitted(df):
    return estimator(validation="held_out").fit(df)


def test_a_fit_without_a_store_trains_on_every_row(fitted):
    history = fitted.getHistory()
    assert [entry["epoch"] for entry in history] == list(range(8))
    assert history[-1]["train"]["loss"] < history[0]["train"]["loss"] / 4
    model, optimizer = fitted.getModelAndOptimizer()
    assert int(optimizer.state[model.weight]["step"]) == 8 * 12  # 182 rows in steps of 2 x 8


def test_the_validation_loss_is_that_of_the_held_out_rows(fitted, df):
    held_out = df.where("held_out").toPandas()
    with torch.no_grad():
        output = fitted.getModel()(torch.tensor(np.stack(held_out["x"]), dtype=torch.float32))
    wanted = functional.mse_loss(output[:, 0], torch.tensor(held_out["y"].to_numpy(), dtype=torch.float32)).item()
    assert fitted.getHistory()[-1]["validation"]["loss"] == pytest.approx(wanted, rel=1e-4)


def test_transform_sends_the_model_with_the_session_once(fitted, df):
    predicted = [fitted.transform(df).select("x", "y__output").collect() for _ in range(2)]
    with torch.no_grad():
        wanted = fitted.getModel()(torch.tensor([row.x for row in predicted[0]])).numpy()[:, 0]
    for rows in predicted:
        np.testing.assert_allclose([row.y__output for row in rows], wanted, rtol=1e-5, atol=1e-6)


def test_the_same_seed_gives_the_same_run_with_and_without_a_store(fitted, df, tmp_path):
    store = Store.create(str(tmp_path / "store"))
    again = estimator(validation="held_out", store=store, data="direct", run_id="kept").fit(df)
    assert torch.equal(weights(again), weights(fitted))
    assert store.list("datasets") == []
    assert [*map(layout.checkpoint_position, store.list(layout.checkpoints_folder("kept")))] == [(7, math.inf)]
    assert store.list(layout.model_folder("kept")) != []


def test_names_of_columns_with_dots_and_backticks_change_nothing(fitted, df):
    renamed = df.withColumnsRenamed({"x": "x.`1", "y": "`y"})
    trained = estimator(validation="held_out", feature_cols=["x.`1"], label_cols=["`y"]).fit(renamed)
    assert torch.equal(weights(trained), weights(fitted))
    assert trained.transform(renamed).select("```y__output`").count() == ROWS


def test_the_partitions_are_even_complete_and_in_seeded_order(df):
    selection = select(df.schema, feature_cols=["x"], label_cols=["y"], validation=0.2)
    first, again, other = (
        in_partitions(partition_for_ranks(df, selection, num_proc=3, seed=s), ["x", "y"]) for s in (5, 5, 6)
    )
    assert sorted(row for rows in first.values() for row in rows) == sorted(map(tuple, df.select("x", "y").collect()))
    assert max(map(len, first.values())) - min(map(len, first.values())) <= 3
    assert first == again
    assert first[0] != other[0]
    assert sorted(first[0]) == sorted(other[0])
    assert first[0] != sorted(first[0])


def test_the_direct_data_path_holds_out_the_same_rows_as_the_store_path(df, spark):
    selection = select(df.schema, feature_cols=["x"], label_cols=["y"], validation=0.2)
    parts = [partition_for_ranks(frame, selection, num_proc=2, seed=5) for frame in (df, df.repartition(4))]
    held_out = [
        sorted(map(tuple, rows.where("sparkhvd_split = 'validation'").select("x", "y").collect())) for rows in parts
    ]
    assert held_out[0] == held_out[1]
    assert 20 < len(held_out[0]) < 65


@pytest.mark.parametrize(
    ("rows", "more", "error", "message"),
    [
        ([([1.0, 2.0], 0.0), (None, 1.0)] * 4, {}, DataError, r"Column 'x' \(feature\) has 4 NULL values"),
        ([([1.0], 0.0), ([1.0, 2.0], 1.0)] * 4, {}, SchemaError, r"Column 'x' \(feature\) has rows of length 1 and 2"),
        ([([1.0, 2.0, 3.0], 0.0)] * 4, {}, ModelOutputError, "It was called with input 0 of shape"),
    ],
    ids=["null", "ragged", "another length than the model takes"],
)
def test_invalid_rows_are_refused_as_on_the_store_path(spark, rows, more, error, message):
    with pytest.raises(error, match=message):
        estimator(**more).fit(spark.createDataFrame(rows, "x array<double>, y double"))


@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        pytest.param(False, "int", id="direct-int"),
        pytest.param(True, "double", id="through a Store-double"),
        pytest.param(False, "double", id="direct-double", marks=pytest.mark.soak),
        pytest.param(True, "int", id="through a Store-int", marks=pytest.mark.soak),
    ],
)
def test_a_class_number_without_an_output_is_refused_before_training_in_any_row(spark, tmp_path, stored, kind):
    model = torch.nn.Linear(2, 3)
    more = {"store": Store.create(str(tmp_path))} if stored else {}
    classes = estimator(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        loss=torch.nn.CrossEntropyLoss(),
        label_cols=["kind"],
        validation=0.2,
        **more,
    )
    rows = spark.range(40).selectExpr("array(id / 40.0D, 1D) AS x", f"CAST(IF(id = 33, 3, id % 3) AS {kind}) AS kind")
    with pytest.raises(ModelOutputError, match=r"label 'kind' of shape \[2\].*: Target 3 is out of bounds"):
        classes.fit(rows)


def test_an_empty_dataframe_is_refused_although_spark_starts_no_task(df, caplog):
    for empty in (df.where("y > 1000"), df.limit(0), df.where(functions.rand() > 2)):
        with pytest.raises(DataError, match="The DataFrame has no rows to train on"):
            estimator().fit(empty)
    assert "has reached this driver" not in caplog.text


def test_a_model_too_large_for_the_job_is_refused_before_it(df, monkeypatch):
    monkeypatch.setattr("sparkhvd.estimators.training.job_files.INLINE_BYTES", 100)
    with pytest.raises(
        ParamError,
        match=r"The model with its optimizer and loss has [\d,]+ bytes, but without a Store, at most 100 bytes",
    ):
        estimator().fit(df)


def kill_rank_1(folder):
    """Write the number of rows and the task of each rank, then kill rank 1."""
    from sparkhvd.comm import session  # noqa: PLC0415

    session.init()
    rank = session.current().world.rank
    rows = sum(ArrowBlocks(path, "here").whole(0).num_rows for path in given_rows().values())
    Path(folder, str(rank)).write_text(f"{rows} {psutil.Process().ppid()}")
    session.current().barrier(name="written")
    if rank == 1:
        os.kill(os.getpid(), 9)
    session.current().barrier(name="never")


def test_the_rows_of_a_killed_rank_are_removed(spark, tmp_path):
    with pytest.raises(RankFailedError, match=r"Rank 1 .*SIGKILL"):
        sparkhvd.run(kill_rank_1, (str(tmp_path),), num_proc=2, spark=spark, rows=spark.range(50).repartition(2))
    reported = [path.read_text().split() for path in tmp_path.iterdir()]
    assert sum(int(rows) for rows, _ in reported) == 50
    for _, task in reported:
        assert open_unnamed_files(int(task)) == []


def open_unnamed_files(pid):
    """Return the unnamed files that a process holds open; none if it has ended."""
    try:
        targets = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except FileNotFoundError:
        return []
    return [target for target in targets if target.endswith("(deleted)") and "/blockmgr-" in target]


WIDTH, WIDE_ROWS = 4000, 13_000  # 416 MB
MEMORY_LIMIT = 320 << 20  # the documented 256 MB of rows, and memory of torch for its first steps
MEMORY_BEFORE_ROWS = 700 << 20  # the memory of a rank that has imported torch
held = []


def within_the_limit(columns):
    """Return the columns; raise an error if memory has grown by more than ``MEMORY_LIMIT`` since the first batch."""
    status = Path("/proc/self/status").read_text()
    held.append(int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024)
    if held[-1] > held[0] + MEMORY_LIMIT or held[0] > MEMORY_BEFORE_ROWS:
        raise MemoryError(f"{held[0]} bytes at first, {held[-1]} after {len(held)} batches")
    return columns


def test_a_rank_does_not_hold_all_its_rows_in_memory(spark):
    df = spark.range(WIDE_ROWS, numPartitions=4).selectExpr(
        f"array_repeat(id / {WIDE_ROWS}D, {WIDTH}) AS x", "id * 1.0D AS y"
    )
    network = torch.nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-9)
    wide = estimator(model=network, optimizer=optimizer, transformation_fn=within_the_limit, num_proc=1)
    trained = wide.setBatchSize(100).setEpochs(2).fit(df)
    assert [entry["epoch"] for entry in trained.getHistory()] == [0, 1]


@pytest.mark.parametrize("sparse_cols", [None, ["v"]], ids=["dense", "sparse"])
def test_vectors_reach_the_model_dense_or_sparse(spark, sparse_cols):
    vectors = [Vectors.sparse(5, {i % 5: 1.0 + i}) if i % 2 else Vectors.dense([0, i, 0, 0, 1]) for i in range(24)]
    df = spark.createDataFrame([(vector, float(i)) for i, vector in enumerate(vectors)], ["v", "y"])
    model = OfVectors(wants_sparse=sparse_cols is not None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = {"model": model, "optimizer": optimizer, "feature_cols": ["v"], "sparse_cols": sparse_cols}
    trained = estimator(**options, batch_size=12, epochs=2).fit(df)

    wanted = OfVectors(wants_sparse=False)
    optimizer = torch.optim.SGD(wanted.parameters(), lr=1e-3)
    features = torch.tensor(np.stack([vector.toArray() for vector in vectors]), dtype=torch.float32)
    for _ in range(2):  # one step per epoch, over all rows
        optimizer.zero_grad()
        functional.mse_loss(wanted(features)[:, 0], torch.arange(24.0)).backward()
        optimizer.step()
    torch.testing.assert_close(weights(trained), wanted.weights.detach().flatten())
    assert len(trained.transform(df).collect()) == 24


class OfVectors(torch.nn.Module):
    """A linear model that declares which form of vectors it takes."""

    def __init__(self, *, wants_sparse):
        super().__init__()
        self.wants_sparse = wants_sparse
        self.weights = torch.nn.Parameter(torch.ones(5, 1))

    def forward(self, v):
        if v.is_sparse is not self.wants_sparse:
            raise ValueError(f"is_sparse is {v.is_sparse}")
        return torch.sparse.mm(v, self.weights) if v.is_sparse else v @ self.weights
