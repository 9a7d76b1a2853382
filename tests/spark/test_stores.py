"""Spark on real HDFS, S3 and GCS: both writers of prepared rows, training, and the check that a Store is shared."""

from __future__ import annotations

import json
import math
import random
import re
import sys
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from pyspark.sql import functions

from sparkhvd import Checkpoints, Store, TorchModel
from sparkhvd.data.prepare import arrow_writer
from sparkhvd.data.prepare.prepared_data import prepare_data
from sparkhvd.data.prepare.store_check import check_store, judge
from sparkhvd.data.spark.settings import in_default_file_system, spark_can_write, with_spark_credentials
from sparkhvd.errors import ParamError, StartTimeoutError, StoreError
from sparkhvd.store import HDFSStore, layout
from sparkhvd.store.probe import new_store_probe
from tests import lines
from tests.hadoop import s3a_jars
from tests.s3_server import BUCKET, SECRET, options_for
from tests.scripts import results_of, run_script
from tests.stores.faulty_s3 import faulty_s3

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module", autouse=True)
def _servers(store_servers):
    """Start the servers, which most tests need."""


@pytest.fixture
def hdfs_store(hdfs):
    made = Store.create(f"{hdfs.url}/{uuid.uuid4().hex}/a store")
    yield made
    made._connection.close()


@pytest.fixture
def s3_store(s3):
    made = Store.create(f"s3a://{BUCKET}/{uuid.uuid4().hex}/a store", storage_options=s3.options)
    yield made
    made._connection.close()


@pytest.fixture
def gcs_store(gcs):
    made = Store.create(f"gs://{BUCKET}/{uuid.uuid4().hex}/a store", storage_options=gcs)
    yield made
    made._connection.close()


@pytest.fixture(params=["hdfs", "s3", "gcs"])
def store(request):
    return request.getfixturevalue(f"{request.param}_store")


def line(spark):
    return lines.points(spark, "array(id / 64.0D, 1.0D) AS pair")


@pytest.mark.filterwarnings("ignore:.*only affects:UserWarning")
@pytest.mark.parametrize("store", ["hdfs", "s3", pytest.param("gcs", marks=pytest.mark.soak)], indirect=True)
def test_an_estimator_trains_on_a_store_and_its_model_predicts_from_there(spark, hdfs, s3, store):
    estimator = lines.estimator(store, validation=0.25, batch_size=4, epochs=3, run_id="the run")
    trained = estimator.fit(line(spark))
    losses = [record.train["loss"] for record in trained.trained.history]
    assert losses[-1] < losses[0]
    predicted = trained.transform(line(spark)).select("y", "y__output").collect()
    assert len(predicted) == 64
    assert all(abs(row["y"] - row["y__output"]) < 2 for row in predicted)
    assert [*map(layout.checkpoint_position, store.list(layout.checkpoints_folder("the run")))] == [(2, math.inf)]
    assert store.list(layout.model_folder("the run"))
    assert [path for path in store.list("") if path.startswith("probes/")] == []
    trained.write().within(store).save("saved/model")
    loaded = TorchModel.read().within(store).load("saved/model")
    assert loaded.transform(line(spark)).select("y", "y__output").collect() == predicted
    with pytest.raises(ParamError, match=r"needs a path in that Store, but .* is a URL"):
        trained.write().within(store).save(f"{store.url}/again")


@pytest.mark.soak
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.filterwarnings("ignore:.*only affects:UserWarning")
def test_a_bad_connection_does_not_change_the_result_of_a_fit_and_its_resumption(spark, s3, tmp_path):
    def trained(store):
        settings = {"validation": 0.25, "batch_size": 4, "run_id": "run", "checkpoints": Checkpoints(every_steps=2)}
        lines.estimator(store, epochs=2, **settings).fit(line(spark))
        model = lines.estimator(store, epochs=4, **settings).fit(line(spark))
        losses = [(record.train["loss"], record.validation["loss"]) for record in model.trained.history]
        return losses, [parameter.tolist() for parameter in model.getModel().parameters()]

    chance = random.Random(5)
    with faulty_s3(s3.endpoint) as relay:
        relay.choose = lambda method, path: (
            chance.choice(["busy", "refuse", "lose", "cut"]) if chance.random() < 0.15 else None
        )
        bad = Store.create(f"s3://{BUCKET}/{uuid.uuid4().hex}", storage_options=options_for(relay.endpoint))
        assert trained(bad) == trained(Store.create(str(tmp_path)))
        bad._connection.close()
    assert sum(not request.endswith("passed") for request in relay.seen) > 20


@pytest.fixture
def sparks_own_credentials(spark, s3):
    """Set S3 options of the Spark session for the duration of a test."""
    settings = {
        "fs.s3a.access.key": s3.options["key"],
        "fs.s3a.secret.key": "that of another bucket",
        f"fs.s3a.bucket.{BUCKET}.secret.key": SECRET,
        "fs.s3a.endpoint": s3.endpoint,
        "fs.s3a.endpoint.region": "us-east-1",
        "fs.s3a.path.style.access": "true",
    }
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    before = {name: conf.get(name) for name in settings}
    for name, value in settings.items():
        conf.set(name, value)
    yield
    for name, value in before.items():
        conf.unset(name) if value is None else conf.set(name, value)


@pytest.mark.cluster
@pytest.mark.soak
def test_spark_writes_rows_to_s3_with_its_own_connector_if_present(s3, tmp_path):
    script = Path(__file__).with_name("s3a_script.py")
    results = results_of(run_script([sys.executable, script, s3a_jars(), json.dumps(s3.options)], tmp_path, 280))
    assert results["loaded by its URL"] == 64
    for source in ("spark", "options"):
        by = results[source]
        assert by["can write"]
        assert "_SUCCESS" in by["files"], "a file that only Spark's writer creates"
        assert len(by["errors"]) == 64
        assert max(by["errors"]) < 0.5, "the line y = 3x + 1 spans 3 and is nearly learned"
        assert by["validation"] < 0.1


@pytest.mark.filterwarnings("ignore:.*only affects:UserWarning")
@pytest.mark.usefixtures("spark", "sparks_own_credentials")
@pytest.mark.parametrize("by", ["train_path of the Store", "path, with the credentials of Spark"])
def test_an_estimator_trains_on_files_in_a_remote_store(hdfs_store, s3_store, tmp_path, by):
    remote = hdfs_store if by.startswith("train_path") else s3_store
    for name, first in (("train/a", 0), ("train/b", 32), ("held out/c", 64)):
        table = pa.table({"x": [i / 64 for i in range(first, first + 32)], "y": [1.0] * 32})
        with remote.open(f"{name}.parquet", "wb") as file:
            parquet.write_table(table, file, row_group_size=10)
    train, held_out = f"{remote.url}/train", f"{remote.url}/held out"
    if remote is hdfs_store:
        store, paths = HDFSStore(train_path=train, val_path=held_out), {}
    else:
        store, paths = Store.create(str(tmp_path)), {"path": train, "validation_path": held_out}
    (record,) = lines.estimator(store, num_proc=1, epochs=1).fit_on_parquet(**paths).trained.history
    assert record.train["loss"] > 0
    assert record.validation["loss"] > 0
    if hasattr(store, "_connection"):
        store._connection.close()


@pytest.mark.usefixtures("sparks_own_credentials")
def test_a_model_on_s3_is_saved_loaded_and_used_with_sparks_credentials(spark, s3_store):
    model = TorchModel.from_model(torch.nn.Linear(1, 1), line(spark), feature_cols=["x"])
    model.save(f"{s3_store.url}/model")
    loaded = TorchModel.load(f"{s3_store.url}/model")
    wanted = model.transform(line(spark)).select("prediction").collect()
    assert loaded.transform(line(spark)).select("prediction").collect() == wanted
    loaded.trained.store._connection.close()


def test_spark_writes_only_if_it_has_a_connector(spark, hdfs_store, s3_store, tmp_path):
    assert spark_can_write(spark, Store.create(str(tmp_path)).spark_url("x"))
    assert spark_can_write(spark, hdfs_store.spark_url("x"))
    assert not spark_can_write(spark, s3_store.spark_url("x")), "the jars of hadoop-aws are not part of pyspark"
    assert not spark_can_write(spark, Store.create("memory://x").spark_url("x"))


def test_a_path_without_a_scheme_is_in_the_default_file_system_of_hadoop(spark, hdfs):
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    assert in_default_file_system(spark, "models/a b") == "models/a b"
    conf.set("fs.defaultFS", hdfs.url)
    try:
        assert in_default_file_system(spark, "/models/a b") == f"{hdfs.url}/models/a b"
        assert re.fullmatch(rf"{re.escape(hdfs.url)}/user/\w+/models", in_default_file_system(spark, "models"))
    finally:
        conf.unset("fs.defaultFS")


def test_our_writer_keeps_all_rows_in_order_and_by_split(spark, hdfs, s3, store):
    rows = spark.range(1000, numPartitions=3).selectExpr(
        "id", "array(id, id + 1) AS pair", "IF(id % 5 = 0, 'validation', 'train') AS part"
    )
    paths = arrow_writer.write(rows, store, "out", row_group_bytes=2000, split="part")
    assert list(paths) == store.list("out")
    assert sum(paths.values()) == 1000
    assert {path.split("/")[1] for path in paths} == {"part=train", "part=validation"}
    read = {"train": [], "validation": []}
    for path in sorted(paths, key=lambda path: path.rpartition("/")[2]):
        filesystem, place = store.arrow(path)
        table = parquet.read_table(place, filesystem=filesystem, partitioning=None)
        assert table.column_names == ["id", "pair"]
        metadata = parquet.read_metadata(place, filesystem=filesystem)
        assert metadata.num_row_groups > 1 or metadata.num_rows < 100
        assert metadata.row_group(0).column(0).statistics.has_min_max
        read[path.split("/")[1].partition("=")[2]] += table.column("id").to_pylist()
    assert read["validation"] == list(range(0, 1000, 5))
    assert read["train"] == [number for number in range(1000) if number % 5]


def test_our_writer_writes_every_type_like_spark(spark, hdfs_store, tmp_path):
    rows = spark.sql(
        "SELECT true AS b, 1Y AS i8, 2S AS i16, 3 AS i32, 4L AS i64, 1.5F AS f32, 2.5D AS f64, 'text' AS s, "
        "X'0102' AS raw, DATE'2020-01-02' AS d, TIMESTAMP'2020-01-02 03:04:05.123456' AS t, 12.34BD AS dec, "
        "array(array(1, 2), array(3, 4)) AS nested, named_struct('a', 1, 'b', 'x') AS st, CAST(NULL AS int) AS n"
    )
    (path,) = arrow_writer.write(rows, hdfs_store, "out", row_group_bytes=1_000_000)
    assert spark.read.parquet(hdfs_store.spark_url(path)).collect() == rows.collect()
    assert spark.read.parquet(hdfs_store.spark_url("out")).schema.simpleString() == rows.schema.simpleString()


def test_our_writer_removes_leftovers_in_its_folder(spark, hdfs_store):
    hdfs_store.publish("out/part-00000-of-an-attempt-that-failed.parquet", b"half")
    paths = arrow_writer.write(spark.range(10), hdfs_store, "out", row_group_bytes=1000)
    assert hdfs_store.list("out") == list(paths)


def test_the_writers_error_names_the_store(spark, hdfs, monkeypatch):
    nowhere = Store.create(
        f"s3://{BUCKET}/x", storage_options={"anon": True, "endpoint_url": "http://127.0.0.1:1"}, retry_seconds=0.2
    )
    with pytest.raises(Exception, match=r"StoreError: Cannot write s3://.*127\.0\.0\.1:1"):
        arrow_writer.write(spark.range(10), nowhere, "out", row_group_bytes=1000)


@pytest.mark.usefixtures("sparks_own_credentials")
def test_a_store_without_credentials_uses_those_of_spark(spark):
    store = with_spark_credentials(Store.create(f"s3a://{BUCKET}/{uuid.uuid4().hex}"), spark)
    own = with_spark_credentials(Store.create(f"s3a://{BUCKET}/x", storage_options={"anon": True}), spark)
    assert store.storage_options["secret"] == SECRET
    assert SECRET not in repr(store)
    store.publish("x", b"1")
    assert store.list("") == ["x"]
    assert own.storage_options["anon"]
    assert not {"key", "secret"} & set(own.storage_options)
    store._connection.close()


def test_credentials_of_a_store_reach_sparks_writer_and_are_hidden(spark, s3_store):
    options = s3_store.spark_options()
    assert options[f"fs.s3a.bucket.{BUCKET}.secret.key"] == SECRET
    rows = spark.range(1).write.options(**options)
    state = rows._jwrite.toString()
    assert SECRET not in state
    jvm = spark.sparkContext._jvm
    shown = (
        jvm.org.apache.spark.sql.internal.SQLConf.get()
        .redactOptions(jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(options))
        .toString()
    )
    assert SECRET not in shown
    assert s3_store.storage_options["key"] not in shown


def test_a_shared_store_passes_the_check_without_leftovers(spark, hdfs, s3, store):
    before = set(spark.sparkContext.statusTracker().getJobIdsForGroup(None))
    check_store(spark, store)
    (job,) = set(spark.sparkContext.statusTracker().getJobIdsForGroup(None)) - before
    (stage,) = spark.sparkContext.statusTracker().getJobInfo(job).stageIds
    assert spark.sparkContext.statusTracker().getStageInfo(stage).numTasks == spark.sparkContext.defaultParallelism
    assert store.list("") == []


def test_a_store_that_executors_do_not_share_is_a_one_sentence_error(spark):
    # Every process has its own memory, like a machine with its own disk.
    store = Store.create(f"memory://{uuid.uuid4().hex}")
    message = (
        r"^The Store memory:///\w+ is not shared: the executor on host \S+ does not see a file that the driver has "
        r"just written\. Use a folder that all machines mount"
    )
    with pytest.raises(StoreError, match=message):
        check_store(spark, store)
    seen = spark.sparkContext.accumulator(0)

    @functions.udf("long")
    def counted(value):
        seen.add(1)
        return value

    with pytest.raises(StoreError, match=message):
        prepare_data(1, store, spark.range(9).select(counted("id").alias("x"), "id"), ["id"])
    assert seen.value == 0
    assert store.list("") == []


def test_an_executor_that_cannot_use_a_store_is_reported_in_whole_sentences():
    unreachable = Store.create(
        f"s3://{BUCKET}/x", storage_options={"anon": True, "endpoint_url": "http://127.0.0.1:1"}, retry_seconds=0.2
    )
    probe = new_store_probe(unreachable)
    message = r"not shared: the executor on host h1 cannot use it: Cannot look up s3://.*/token: .*[^.]\. Use a folder"
    with pytest.raises(StoreError, match=message):
        judge(probe, [("h1", "0-0", probe.answer("0-0"))])
    unreachable._connection.close()


def test_the_check_does_not_wait_for_silent_executors(spark):
    store = Store.create(f"memory://{uuid.uuid4().hex}")
    with pytest.raises(StartTimeoutError, match=r"did not report within start_timeout=0\.001 s whether they see"):
        check_store(spark, store, seconds=0.001)
    assert store.list("") == []


def test_a_folder_on_a_local_master_is_not_checked(spark, tmp_path):
    store = Store.create(str(tmp_path))
    jobs = spark.sparkContext.statusTracker().getJobIdsForGroup(None)
    check_store(spark, store)
    assert spark.sparkContext.statusTracker().getJobIdsForGroup(None) == jobs
