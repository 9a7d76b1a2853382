from __future__ import annotations

import logging
import signal
import threading

import pytest
import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions

from sparkhvd import TorchEstimator, TorchModel, prepare_data
from sparkhvd.data import clean, load
from sparkhvd.errors import ConfigError, DataError, SchemaError, StoreError
from sparkhvd.store import LocalStore, layout
from tests.spark.prepared_rows import datasets_in, estimator, parameters
from tests.waiting import wait_for

pytestmark = pytest.mark.spark

# Horovod's interface.


def test_the_arguments_match_horovods_in_order(spark, store):
    df = spark.range(30).selectExpr("id AS x", "id * 2 AS y", "id * 1.0D AS w", "id % 3 = 0 AS v", "id AS unused")
    with prepare_data(2, store, df, ["y"], ["x"], "v", "w", False, 3, 1) as data:
        assert [(column.name, column.role) for column in data.schema.columns] == [
            ("x", "feature"),
            ("y", "label"),
            ("w", "weight"),
        ]
        assert (data.train_rows, data.validation_rows) == (20, 10)
        assert load(store, data.manifest.path) == data.manifest
        assert repr(data) == f"<PreparedData {data.dataset_id}: 20 rows to train on, 10 held out>"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_processes": 0}, ConfigError, "num_proc is 0; it must be at least 1"),
        ({"partitions_per_process": 0}, ConfigError, "partitions_per_process is 0"),
        ({"row_group_bytes": 0}, ConfigError, "row_group_bytes is 0"),
        ({"keep_seconds": -1}, ConfigError, "keep_seconds is -1"),
        ({"label_columns": []}, SchemaError, "No label column is selected; label_columns is empty"),
        ({"label_columns": ["why"]}, SchemaError, r"There is no column 'why' \(requested as label\)"),
        ({"fill": {"q": 1}}, SchemaError, "fill names 'q'"),
        ({"validation": 1.5}, SchemaError, "The validation fraction 1.5 is not in"),
    ],
)
def test_invalid_arguments_are_refused_before_any_work(spark, store, arguments, error, message):
    df = spark.range(3).selectExpr("id AS x", "id AS y")
    with pytest.raises(error, match=message):
        prepare_data(**{"num_processes": 1, "store": store, "df": df, "label_columns": ["y"], **arguments})
    assert store.list("") == []


def test_the_documented_flow_trains_like_fit_and_keeps_to_its_rows(store, source, tmp_path):
    _, read = source
    wanted = estimator(LocalStore(str(tmp_path / "other")), validation=0.25).fit(read())
    with prepare_data(2, store, read(), ["y"], ["x", "z"], validation=0.25, seed=3, keep_seconds=0) as data:
        with prepare_data(2, store, read().where("x > 20"), ["y"], ["x"], keep_seconds=0):  # has no column z
            inside = estimator(store).fit_on_parquet()
        by_object = estimator(store).fit_on_parquet(dataset_idx=data)
        assert datasets_in(store) == [data.dataset_id]
    assert parameters(inside) == parameters(by_object) == parameters(wanted)
    assert inside.getHistory()[0]["validation"]["loss"] == wanted.getHistory()[0]["validation"]["loss"]
    assert datasets_in(store) == []
    with pytest.raises(DataError, match=r"No dataset with the columns \['x', 'z', 'y'\] is open in file://"):
        estimator(store).fit_on_parquet()


def test_fit_on_parquet_reads_what_spark_and_pandas_wrote(spark, store, source, tmp_path):
    folder, read = source
    read().coalesce(1).write.parquet(str(tmp_path / "by spark"))
    read().toPandas().to_parquet(tmp_path / "by pandas.parquet")
    whole = estimator(store).fit_on_parquet(path=str(tmp_path / "by spark"))
    assert parameters(whole) == parameters(estimator(None).fit_on_parquet(path=str(tmp_path / "by pandas.parquet")))
    both = estimator(store).fit_on_parquet(
        path=str(tmp_path / "by spark"), validation_path=str(tmp_path / "by pandas.parquet")
    )
    assert both.getHistory()[0]["validation"]["loss"] > 0
    with pytest.raises(SchemaError, match="There is no column 'z'"):
        estimator(store).fit_on_parquet(path=str(folder))
    with pytest.raises(DataError, match=r"validation=0.1 cannot split existing Parquet files"):
        estimator(store, validation=0.1).fit_on_parquet(path=str(folder))


def test_vectors_reach_the_model_dense_or_sparse(spark, store):
    rows = [
        (Vectors.sparse(5, {i % 5: 1.0 + i}) if i % 2 else Vectors.dense([0, i, 0, 0, 1]), float(i)) for i in range(24)
    ]
    df = spark.createDataFrame(rows, ["v", "y"])
    torch.manual_seed(2)
    weights = torch.nn.Parameter(torch.randn(5, 1))

    class Sparse(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.Parameter(weights.detach().clone())

        def forward(self, v):
            if v.is_sparse is not self.wanted:
                raise ValueError(f"is_sparse is {v.is_sparse}")
            return torch.sparse.mm(v, self.weights) if v.is_sparse else v @ self.weights

    fitted = []
    for sparse in (True, False):
        model = Sparse()
        model.wanted = sparse
        options = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4), "feature_cols": ["v"]}
        trained = estimator(store, **options, sparse_cols=["v"] if sparse else None, num_proc=1).fit(df)
        fitted.append(trained)
        assert len(trained.transform(df).collect()) == 24
    assert parameters(fitted[0]) == pytest.approx(parameters(fitted[1]))


def test_null_is_filled_in_training_and_in_transform(spark, store):
    df = spark.range(20).selectExpr("IF(id % 4 = 0, NULL, id * 1.0D) AS x", "id * 1.0D AS z", "id * 1.0D AS y")
    trained = estimator(store, fill={"x": -1.0}, num_proc=1).fit(df)
    filled = estimator(store, num_proc=1).fit(df.fillna({"x": -1.0}))
    assert parameters(trained) == parameters(filled)
    rows = trained.transform(df).orderBy("y").collect()
    wanted = filled.transform(df.fillna({"x": -1.0})).orderBy("y").collect()
    assert [row.y__output for row in rows] == [row.y__output for row in wanted]


def test_the_fields_of_a_struct_are_separate_inputs(spark, store):
    df = spark.range(20).selectExpr("named_struct('x', id * 1.0D, 'z', id * 2.0D) AS s", "id * 1.0D AS y")
    flat = df.select("s.x", "s.z", "y")
    wanted = parameters(estimator(store, num_proc=1, shuffle=False).fit(flat))
    through_store = estimator(store, num_proc=1, shuffle=False, feature_cols=["s"]).fit(df)
    assert parameters(through_store) == wanted
    assert len(through_store.transform(df).collect()) == 20
    # Without a Store, the order of the rows depends on their content.
    direct = estimator(None, num_proc=1, shuffle=False, feature_cols=["s"]).fit(df)
    assert parameters(direct) == parameters(estimator(None, num_proc=1, shuffle=False).fit(flat))
    assert len(direct.transform(df).collect()) == 20


class Two(torch.nn.Module):
    """Takes two inputs and gives two outputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.one, self.other = torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)

    def forward(self, pair, z):
        return self.one(pair), self.other(z)


def test_structs_are_labels_and_named_inputs(spark, store):
    """Train with a Store, without one, and from files; the results equal those of the same columns without structs."""
    columns = (
        "struct(id / 8.0D AS a, id % 3 / 3.0D AS b, id % 4 / 4.0D AS c) AS s",
        "struct(id % 5 / 5.0D AS u, id / 20.0D AS v) AS y",
    )
    df = spark.range(20).selectExpr(*columns).coalesce(1)

    def fitted(store, rows, inputs, labels, **more):
        two = Two()
        made = TorchEstimator(
            num_proc=1,
            store=store,
            model=two,
            optimizer=torch.optim.SGD(two.parameters(), lr=0.1),
            loss=[torch.nn.functional.mse_loss] * 2,
            inputs=inputs,
            label_cols=labels,
            batch_size=5,
            epochs=1,
            shuffle=False,
            random_seed=2,
            verbose=0,
            **more,
        )
        return made.fit_on_parquet(path=rows) if isinstance(rows, str) else made.fit(rows)

    flat = df.select("s.a", "s.b", "s.c", "y.u", "y.v")
    wanted = fitted(store, flat, {"pair": ["a", "b"], "z": {"columns": "c", "shape": [1]}}, ["u", "v"])
    numbers = [value for row in wanted.transform(flat).collect() for value in row[-2:]]
    structs = {"inputs": {"pair": ["s.a", "s.b"], "z": {"columns": "s.c", "shape": [1]}}, "labels": ["y"]}
    path = f"{store.root}-rows"
    df.write.parquet(path)
    for rows in (df, path):
        found = fitted(store, rows, **structs)
        assert found.getOutputCols() == ["y.u__output", "y.v__output"]
        assert [value for row in found.transform(df).collect() for value in row[-2:]] == numbers
    direct = fitted(None, df, structs["inputs"], ["y.v", "y.u"], output_cols=["first", "second"])
    assert direct.transform(df).columns == ["s", "y", "first", "second"]
    whole = TorchModel.from_model(torch.nn.Linear(3, 1), df, inputs={"input": "s"}, label_cols=["y.v"])
    assert whole.transform(df.selectExpr("struct(s.c, s.b, s.a) AS s")).columns == ["s", "y.v__output"]


# Endings.


def test_failures_and_unidentified_datasets_leave_no_files(spark, store):
    df = spark.range(10).selectExpr("id AS x", "IF(id < 9, id, raise_error('row 9 is bad')) AS y")
    with pytest.raises(Exception, match="row 9 is bad"):
        prepare_data(1, store, df, ["y"])
    assert store.list("") == []
    rows = spark.createDataFrame([(1, 2)], ["x", "y"])
    data = prepare_data(1, store, rows, ["y"])
    assert datasets_in(store) == [data.dataset_id]
    data.close()
    data.close()
    assert store.list("") == []


def test_prepared_rows_expire_after_their_last_use(store, source):
    _, read = source
    with prepare_data(1, store, read(), ["y"], keep_seconds=1000) as data:
        pass
    lease = layout.lease_path(data.dataset_id, "released")
    with store.open(lease, "wb") as file:
        file.write(b'{"time": 0, "keep_seconds": 1000}')
    with prepare_data(1, store, read().where("x > 1"), ["y"], keep_seconds=0):
        assert data.dataset_id not in datasets_in(store)
    assert store.list("") == []


def test_verbose_logs_the_preparation(store, source, caplog):
    _, read = source
    for verbose, lines in [(0, 0), (1, 1)]:
        with (
            caplog.at_level(logging.INFO, "sparkhvd.data.prepare.prepared_data"),
            prepare_data(1, store, read(), ["y"], verbose=verbose),
        ):
            assert len([r for r in caplog.records if "40 rows to train on> in file://" in r.getMessage()]) == lines


def test_named_datasets_are_kept_and_found_for_any_rows(spark, store, source, caplog):
    doubled = functions.udf(lambda x: x * 2.0, "double")

    def made():
        return source[1]().withColumn("z", doubled("x"))

    with prepare_data(2, store, made(), ["y"], ["x", "z"], name="train v3", validation=0.2, seed=4) as data:
        assert (data.reused, data.manifest.name) == (False, "train v3")
    assert datasets_in(store) == [data.dataset_id]
    assert not caplog.records
    net = torch.nn.Linear(2, 1)
    estimator = TorchEstimator(
        num_proc=1,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        loss=torch.nn.MSELoss(),
        feature_cols=["x", "z"],
        label_cols=["y"],
        store=store,
        verbose=0,
    )
    estimator.fit_on_parquet(dataset_idx="train v3")
    assert datasets_in(store) == [data.dataset_id], "using the dataset must not remove it"
    again = {"label_columns": ["y"], "feature_columns": ["x", "z"], "name": "train v3", "validation": 0.2, "seed": 4}
    with prepare_data(1, store, made(), **again) as found:
        assert (found.reused, found.dataset_id) == (True, data.dataset_id)
    for change, message in [
        ({"feature_columns": ["z", "x"]}, "their columns, types or fills differ"),
        ({"seed": 5}, "their validation splits differ"),
        ({"name": "../x"}, "The name '../x' cannot be a folder name"),
        ({"keep_seconds": 0}, "name='train v3' keeps the rows, but keep_seconds=0 removes them"),
        ({"name": 5}, "name must be a string or None, got int 5"),
    ]:
        with pytest.raises((DataError, StoreError, ConfigError), match=message):
            prepare_data(1, store, made(), **{**again, **change})
    with prepare_data(1, store, source[1](), ["y"], name="plain"):
        pass
    with pytest.raises(
        DataError, match=r"'plain' already belongs to other rows .*: the DataFrame, its files or the settings"
    ):
        prepare_data(1, store, source[1]().where("x > 3"), ["y"], name="plain")
    assert len(clean(store)) == 2
    assert [path for path in store.list("") if not path.startswith("runs/")] == []
    with pytest.raises(StoreError, match=r"There is no dataset at .*train v3"):
        estimator.fit_on_parquet(dataset_idx="train v3")


def test_a_warning_names_the_reason_why_rows_cannot_be_reused(spark, store, source, caplog):
    spark.udf.register("doubled", lambda x: x * 2, "long")
    reasons = {
        "unix_timestamp()": "CurrentTimestamp",
        "rand(3)": "Rand",
        "doubled(x)": "the function 'doubled' (PythonUDF)",
    }
    for column, reason in reasons.items():
        caplog.clear()
        with prepare_data(1, store, source[1]().selectExpr("y", f"{column} AS t"), ["y"]):
            pass
        (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert f"no later job can reuse them: {reason} is not known to be deterministic." in line
        assert line.endswith("prepare_data(name=...) keeps them.")
    assert store.list("") == []


def test_an_interrupt_cancels_the_spark_job_and_leaves_no_files(spark, store):
    def interrupt() -> None:
        try:
            wait_for(lambda: any(path.endswith(".parquet") for path in store.list("")), 90.0)
        finally:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    slow = spark.range(0, 10**11, 1, 1).select("id", (functions.rand(1) + functions.col("id")).alias("y"))
    # In place of PySpark's handler, which cancels the jobs itself.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            prepare_data(1, store, slow, ["y"])
    finally:
        interrupter.join()
        signal.signal(signal.SIGINT, previous)
    assert list(spark.sparkContext.statusTracker().getActiveJobsIds()) == []
    assert store.list("") == []
