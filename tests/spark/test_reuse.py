from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager

import numpy as np
import pandas as pd
import pytest
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import functions

from sparkhvd import prepare_data
from sparkhvd._util.processes.process_identity import machine_id, process_start
from sparkhvd.data import clean
from sparkhvd.data.reuse.fingerprint import fingerprint, living_caches
from sparkhvd.errors import DataError, ParamError
from sparkhvd.store import LocalStore
from tests.spark.prepared_rows import datasets_in, estimator, prepared_anew, rows_of

pytestmark = pytest.mark.spark


def test_another_dataframe_and_estimator_reuse_the_same_prepared_rows(store, source):
    _, read = source
    with prepare_data(1, store, read(), ["y"]) as first:
        assert not first.reused
    with prepare_data(2, store, read(), ["y"]) as second:
        assert second.reused
        assert second.manifest == first.manifest
    assert datasets_in(store) == [first.dataset_id]
    fitted = estimator(store, feature_cols=["x", "z"])
    fitted.fit(read())
    assert datasets_in(store) == [first.dataset_id]
    with pytest.raises(DataError, match="There are 40 rows to train on but num_proc is 41"):
        prepare_data(41, store, read(), ["y"])
    assert clean(store) == [first.dataset_id]
    assert [path for path in store.list("") if not path.startswith("runs/")] == []


def test_a_change_that_affects_the_rows_prepares_again(spark, store, source):
    _, read = source
    assert prepared_anew(read(), store)
    assert not prepared_anew(read(), store)
    assert prepared_anew(read().where("x > 1"), store)
    assert prepared_anew(read().withColumn("z", functions.col("x") * 2.25), store)
    assert prepared_anew(read(), store, feature_columns=["x"])
    assert prepared_anew(read(), store, fill={"x": 0})
    assert prepared_anew(read(), store, validation=0.5)
    assert not prepared_anew(read(), store, validation=0.5)
    assert prepared_anew(read(), store, validation=0.5, seed=1)
    assert not prepared_anew(read(), store, seed=1)  # nothing is split
    assert prepared_anew(read(), store, row_group_bytes=1_000_000)
    assert not prepared_anew(read(), store, row_group_bytes=1_000_000)
    spark.conf.set("spark.sql.ansi.enabled", "false")
    try:
        assert prepared_anew(read(), store)
    finally:
        spark.conf.unset("spark.sql.ansi.enabled")
    assert not prepared_anew(read(), store)


@pytest.mark.parametrize("change", ["append", "rewrite", "touch", "remove"])
def test_changed_files_are_prepared_again(spark, store, source, change):
    folder, read = source
    before = read()
    assert prepared_anew(before, store)
    assert not prepared_anew(before, store)
    first = sorted(folder.glob("part-*.parquet"))[0]
    if change == "append":
        spark.range(100, 101).selectExpr("id AS x", "0.5D AS y").write.mode("append").parquet(str(folder))
    elif change == "rewrite":
        (folder / f".{first.name}.crc").unlink()
        read().withColumn("x", functions.col("x") + 1).limit(7).toPandas().drop(columns="z").to_parquet(first)
    elif change == "touch":
        status = first.stat()
        os.utime(first, ns=(status.st_atime_ns, status.st_mtime_ns + 5_000_000))
    else:
        first.unlink()
    assert fingerprint(before) is None, "the DataFrame was made from other files"
    with prepare_data(1, store, read(), ["y"]) as data:
        assert not data.reused
        assert sorted(rows_of(data)["x"]) == sorted(row.x for row in read().select("x").collect())


def test_times_in_text_files_depend_on_the_time_zone_of_the_driver(spark, tmp_path):
    (tmp_path / "x.csv").write_text("2024-01-01 00:00:00,1\n")
    df = spark.read.schema("at timestamp, y int").csv(str(tmp_path))
    zones, here = spark._jvm.java.util.TimeZone, fingerprint(df)
    default = zones.getDefault()
    zones.setDefault(zones.getTimeZone("Asia/Kathmandu"))
    try:
        assert fingerprint(df) != here
    finally:
        zones.setDefault(default)
    assert fingerprint(df) == here is not None


def test_nondeterministic_rows_are_never_reused(spark, source):
    _, read = source
    df = read()
    assert fingerprint(df) == fingerprint(read())
    assert fingerprint(spark.range(5)) == fingerprint(spark.range(5)) != fingerprint(spark.range(6))
    values = "SELECT * FROM VALUES (1, 'a,b'), (2, 'c') AS t(x, s)"
    others = "SELECT * FROM VALUES (1, 'a'), (2, 'b,c') AS t(x, s)"
    assert fingerprint(spark.sql(values)) == fingerprint(spark.sql(values)) != fingerprint(spark.sql(others))
    views = []
    for where in ("x > 1", "x > 1", "x > 2"):
        df.where(where).createOrReplaceTempView("chosen")
        views.append(fingerprint(spark.table("chosen")))
    assert views[0] == views[1] != views[2]
    assert views[0] is not None
    same = functions.udf(lambda x: x, "long")
    unknown = {
        "random": df.withColumn("r", functions.rand(1)),
        "shuffled": df.orderBy(functions.rand()),
        "a Python function": df.withColumn("x", same("x")),
        "the time": df.withColumn("t", functions.current_timestamp()),
        "the day": df.where(functions.current_date() > "2020-01-01"),
        "the file": df.withColumn("f", functions.input_file_name()),
        "a number": df.withColumn("n", functions.monotonically_increasing_id()),
        "pandas": df.mapInPandas(lambda frames: frames, df.schema),
        "rows of Python": spark.createDataFrame([(1, 2)], ["x", "y"]),
        "an RDD": df.rdd.toDF(),
        "a checkpoint": df.localCheckpoint(),
        "a sub-query": df.where("x IN (SELECT id FROM range(3))"),
        "an array": df.withColumn("a", functions.lit(np.array([1.0, 2.0]))),
    }
    assert {name: fingerprint(one) for name, one in unknown.items() if fingerprint(one) is not None} == {}


def test_a_cache_is_recognized_only_during_its_lifetime(spark, store, source):
    """A cache holds the rows of one evaluation, even if another evaluation would give other rows."""
    _, read = source
    plain = fingerprint(read())
    rows = read().withColumn("r", functions.rand()).orderBy("r")  # with a shuffle, whose plan changes when it has run
    cached = rows.cache()
    with prepare_data(1, store, cached, ["y"]) as first:
        kept = rows_of(first)["r"].tolist()
    seen = [fingerprint(cached), fingerprint(cached.where("x > 3"))]
    assert len({plain.text, *(one.text for one in seen)}) == 3
    assert plain.caches == ()
    assert seen[0].caches == seen[1].caches != ()
    (cache,) = seen[0].caches
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    here, start = machine_id(), process_start(os.getpid())
    others = {
        f"app/1/{os.getpid()}@{start}@{here}/7": True,
        f"app/1/{os.getpid()}@{int(start) - 1}@{here}/7": False,  # the process id of an ended process, used again
        f"app/1/{ended.pid}@{start}@{here}/7": False,
        f"app/1/{ended.pid}@{start}@elsewhere/7": True,
        f"app/1/@{here}/{10**30}": True,
        "damaged": True,
    }
    assert {name: living_caches(spark)(name) for name in (cache, *others)} == {cache: True, **others}
    with prepare_data(1, store, cached, ["y"]) as second:
        assert (second.reused, rows_of(second)["r"].tolist()) == (True, kept)
    cached.unpersist(blocking=True)
    assert fingerprint(rows) is None, "its rows are random"
    again = rows.cache()
    try:
        assert fingerprint(again) not in seen
        with prepare_data(1, store, again, ["y"]) as third:
            assert not third.reused
            assert datasets_in(store) == [third.dataset_id], "no later job can reuse the rows of a removed cache"
        with pytest.raises(ParamError, match="contains a user-defined function, a cache or a random expression"):
            estimator(store, resume="auto", label_cols=["y"]).fit(again)
    finally:
        again.unpersist(blocking=True)
    assert fingerprint(read().cache().unpersist(blocking=True)) == plain


def test_transformers_of_spark_ml_are_recognized_by_their_content(source):
    _, read = source

    def assembled(**more):
        return VectorAssembler(inputCols=["x", "z"], outputCol="v", **more).transform(read())

    assert fingerprint(assembled()) == fingerprint(assembled()) is not None
    assert fingerprint(assembled(handleInvalid="keep")) not in {None, fingerprint(assembled())}
    own = functions.udf(lambda x: x, "long")
    assert fingerprint(assembled().withColumn("x", own("x"))) is None


def test_simultaneous_preparations_of_the_same_rows_write_them_once(store, source):
    _, read = source
    df = read().cache()
    prepared, start = [], threading.Barrier(3)

    def one():
        start.wait(60)
        with prepare_data(1, store, df, ["y"]) as data:
            prepared.append((data.dataset_id, data.reused, rows_of(data)["x"].sum()))

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    df.unpersist()
    assert len({dataset for dataset, _, _ in prepared}) == 1
    assert sorted((reused, total) for _, reused, total in prepared) == [(False, 780), (True, 780), (True, 780)]


def test_rows_of_pandas_are_recognized_by_their_content(spark):
    spark.conf.set("spark.sql.execution.arrow.pyspark.enabled", "true")
    try:
        frames = [spark.createDataFrame(pd.DataFrame({"x": [1, 2, last]})) for last in (3, 3, 4)]
        first, same, other = (fingerprint(frame) for frame in frames)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.pyspark.enabled")
    assert first == same or first is None
    assert other is None or other != first


def test_files_that_change_during_preparation_are_not_reused(store, source):
    folder, read = source
    df = read()

    class Meddling(LocalStore):
        def list(self, path):
            if path.startswith("datasets/"):  # after the write
                (folder / "part-9.parquet").write_bytes(next(folder.glob("part-*.parquet")).read_bytes())
            return super().list(path)

    with prepare_data(1, Meddling(store.root), df, ["y"]) as data:
        assert data.manifest.fingerprint is None
    assert datasets_in(store) == []


def test_damaged_datasets_are_prepared_again(store, source):
    _, read = source
    with prepare_data(1, store, read(), ["y"]) as first:
        pass
    store.delete(f"{first.manifest.folder}/{first.manifest.train.files[0].path}")
    with prepare_data(1, store, read(), ["y"]) as second:
        assert not second.reused
        assert len(rows_of(second)["x"]) == 40
    assert datasets_in(store) == [second.dataset_id]


def test_concurrent_drivers_prepare_and_reuse_without_harm(store, source):
    _, read = source
    prepared, failed = [], []

    def one():
        try:
            for _ in range(2):
                with prepare_data(1, store, read(), ["y"]) as data:
                    prepared.append(rows_of(data)["x"].sum())
                clean(store)
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failed == []
    assert prepared == [sum(range(40))] * 6


DRIVER = """
    import json
    import sys
    from pyspark.sql import SparkSession, functions
    from sparkhvd import prepare_data
    from sparkhvd.store import LocalStore

    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    spark = builder.config(map=json.loads(sys.argv[3])).getOrCreate()
    rows = spark.read.parquet(sys.argv[2]).where("x >= 0").withColumn("z", functions.col("x") * 2.5)
    print("ready", flush=True)
    sys.stdin.readline()
    found = []
    for one in (rows, rows.randomSplit([0.7, 0.3], seed=1)[0]):
        with prepare_data(1, LocalStore(sys.argv[1]), one, ["y"]) as data:
            found += [data.dataset_id, data.train_rows, data.reused]
    print(*found, flush=True)
"""


@contextmanager
def another_driver(spark, store, folder):
    """Yield a process that prepares rows after a line of input; its session has the settings of ``spark``."""
    settings = {name: value for name, value in spark.sparkContext.getConf().getAll() if name.startswith("spark.sql.")}
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), store.root, str(folder), json.dumps(settings)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as driver:
        try:
            assert driver.stdout.readline() == "ready\n"
            yield driver
        finally:
            driver.kill()


def test_datasets_of_concurrent_drivers_are_reused_by_a_later_one(spark, store, source):
    folder, read = source
    with another_driver(spark, store, folder) as other:
        other.stdin.write("go\n")
        other.stdin.flush()
        with prepare_data(1, store, read(), ["y"]) as own:
            assert own.train_rows == 40
        dataset, rows, *_ = other.communicate(timeout=120)[0].split()
        assert rows == "40"
    with another_driver(spark, store, folder) as later:
        [found, rows, reused, _, _, part_reused] = later.communicate("go\n", timeout=120)[0].split()
    assert found in {dataset, own.dataset_id}
    assert (rows, reused, part_reused) == ("40", "True", "True")
    with prepare_data(1, store, read(), ["y"]) as again:
        assert again.reused
    with prepare_data(1, store, read().randomSplit([0.7, 0.3], seed=1)[0], ["y"]) as part:
        assert not part.reused, "randomSplit takes other rows of files that are divided otherwise"
