from __future__ import annotations

import os
import subprocess
import threading
from contextlib import closing
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import Row, functions
from pyspark.sql import types as t

from sparkhvd.data import ParquetSource, head, load, select, torch_loader
from sparkhvd.data.prepare import prepare as prepare_module
from sparkhvd.data.prepare.direct_rows import TaskRows, checked, partition_for_ranks
from sparkhvd.data.prepare.prepare import WriteOptions, prepare
from sparkhvd.data.prepare.stats import SPLIT
from sparkhvd.data.read.readers import ReadOptions
from sparkhvd.data.read.spool import Spool
from sparkhvd.data.schema import columns
from sparkhvd.errors import ConfigError, DataError, SchemaError, StoreError
from sparkhvd.store import LocalStore
from sparkhvd.world import World

pytestmark = pytest.mark.spark

VECTORS_AND_Y = t.StructType(
    [t.StructField("v", VectorUDT()), t.StructField("w", VectorUDT()), t.StructField("y", t.IntegerType())]
)


@pytest.fixture
def store(tmp_path):
    return LocalStore(str(tmp_path / "my store"))


def prepare_all(df, store, *, labels=("y",), features=None, weight=None, validation=None, num_proc=2, seed=7):
    selection = select(df.schema, feature_cols=features, label_cols=labels, weight_col=weight, validation=validation)
    return prepare(df, selection, store, writing=WriteOptions(num_proc, seed))


def rows_of(store, manifest, split="train"):
    """Return all rows of a split in DataFrame order, by column."""
    source = ParquetSource(store, manifest, split, World(), 7, seed=0, shuffle=False)
    batches = list(source.epoch(0))
    return {name: np.concatenate([batch.columns[name] for batch in batches]) for name in manifest.schema.names()}


def directly(df, selection, folder):
    """Return the same rows in the form that a rank receives without a Store, ordered by label."""
    with closing(Spool([str(folder)], by=SPLIT, otherwise="train")) as spool:
        for batch in partition_for_ranks(df, selection, num_proc=1, seed=0).toArrow().to_batches():
            spool.write(batch)
        given = TaskRows(spool.finish(), selection, 0)
        facts = given.facts()
        options = {"seed": 0, "shuffle": False, "steps_per_epoch": None, "reading": ReadOptions()}
        source = given.source("train", checked(facts, selection, 1), facts, World(), 7, **options)
        (batch,) = source.epoch(0)
    order = np.argsort(batch.columns["y"])
    return {name: array[order] for name, array in batch.columns.items()}


def numbers(spark, rows=100, partitions=3):
    return spark.range(0, rows, 1, partitions).select(
        functions.col("id").alias("x"), (functions.col("id") % 3).alias("y")
    )


def assert_nothing_is_left(store):
    assert store.list("") == []
    assert list(Path(store.root).glob("datasets/*")) == []


def test_the_rows_arrive_in_dataframe_order_without_validation(spark, store):
    manifest = prepare_all(numbers(spark), store)
    assert rows_of(store, manifest)["x"].tolist() == list(range(100))
    assert manifest.train.rows == 100
    assert manifest.validation is None
    assert len(manifest.train.files) == 3
    assert load(store, manifest.path) == manifest


def test_the_rows_arrive_in_dataframe_order_in_both_splits(spark, store):
    # More rows per task than a page of a sort buffer, and partitions of different sizes, would show a wrong order.
    df = numbers(spark, 20_000, 3).union(numbers(spark, 50, 2).withColumn("x", functions.col("x") + 20_000))
    manifest = prepare_all(df, store, validation=0.3)
    train, held_out = rows_of(store, manifest)["x"], rows_of(store, manifest, "validation")["x"]
    assert (np.diff(train) > 0).all()
    assert (np.diff(held_out) > 0).all()
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(20_050))
    assert 0.28 < len(held_out) / 20_050 < 0.32


def executions(spark):
    """Return the descriptions of all queries that Spark has run, by number."""
    entries = spark._jsparkSession.sharedState().statusStore().executionsList()
    return {entries.apply(i).executionId(): entries.apply(i).physicalPlanDescription() for i in range(entries.size())}


def test_the_write_needs_no_sort_or_exchange_and_restores_the_session(spark, store):
    settings, before = dict(spark.conf.getAll), executions(spark)
    prepare_all(numbers(spark), store, validation=0.3)
    (plan,) = [plan for number, plan in executions(spark).items() if number not in before]
    tree = plan.partition("\n\n")[0]
    assert "Sort" not in tree
    assert "Exchange" not in tree
    assert dict(spark.conf.getAll) == settings


def test_the_lineage_is_evaluated_once(spark, store):
    seen = spark.sparkContext.accumulator(0)

    @functions.udf("long")
    def counted(value):
        seen.add(1)
        return value

    df = numbers(spark).withColumn("x", counted("x")).withColumn("a", functions.array("x", "x"))
    prepare_all(df, store, validation=0.3)
    assert seen.value == 100


def test_without_a_copied_session_rows_are_sorted_once_and_keep_their_order_in_a_spill(spark, store, monkeypatch):
    monkeypatch.setattr("sparkhvd.data.prepare.prepare.with_own_settings", lambda rows, settings: None)
    before = executions(spark)
    # Merging spilled runs loses the order of equal keys; with runs of 1000 rows, this sort merges.
    setting = "spark.shuffle.spill.numElementsForceSpillThreshold"
    conf = spark.sparkContext._jsc.sc().conf()
    conf.set(setting, "1000")
    try:
        manifest = prepare_all(numbers(spark, 20_000, 1), store, validation=0.5, num_proc=1)
    finally:
        conf.remove(setting)
    (plan,) = [plan for number, plan in executions(spark).items() if number not in before]
    tree = plan.partition("\n\n")[0]
    assert tree.count("Sort (") == 1, f"Spark sorts once more, and not by row number:\n{tree}"
    assert (np.diff(rows_of(store, manifest)["x"]) > 0).all()
    assert (np.diff(rows_of(store, manifest, "validation")["x"]) > 0).all()


def test_every_supported_type_arrives_unchanged(spark, store):
    types = {
        "bool": (t.BooleanType(), True),
        "int8": (t.ByteType(), -7),
        "int16": (t.ShortType(), 300),
        "int32": (t.IntegerType(), -70_000),
        "int64": (t.LongType(), 2**60),
        "float32": (t.FloatType(), 1.5),
        "float64": (t.DoubleType(), 1e300),
    }
    fields, row = [], {}
    for name, (spark_type, value) in types.items():
        fields += [t.StructField(name, spark_type), t.StructField(f"{name} list.a", t.ArrayType(spark_type))]
        row |= {name: value, f"{name} list.a": [value, value, type(value)(0)]}
    fields += [t.StructField("vector", VectorUDT()), t.StructField("y", t.LongType())]
    data = [
        (*row.values(), vector, y) for vector, y in [(Vectors.dense([1, 0, 2]), 0), (Vectors.sparse(3, {1: 4.5}), 1)]
    ]
    df = spark.createDataFrame(data, t.StructType(fields)).coalesce(1)
    manifest = prepare_all(df, store, num_proc=1)
    columns = rows_of(store, manifest)
    for name, (_, value) in types.items():
        assert columns[name].dtype == columns[f"{name} list.a"].dtype == np.dtype(name)
        assert columns[name].tolist() == [value, value]
        assert columns[f"{name} list.a"].tolist() == [[value, value, type(value)(0)]] * 2
        assert manifest.schema[f"{name} list.a"].shape == (3,)
    assert columns["vector"].dtype == np.float64
    assert columns["vector"].tolist() == [[1, 0, 2], [0, 4.5, 0]]
    assert manifest.schema["vector"].kind == "vector"


@pytest.fixture
def settings(spark):
    """Provide a function that changes a setting until the end of the test."""
    changed = []

    def change(name, value):
        changed.append(name)
        spark.conf.set(name, value)

    yield change
    for name in changed:
        spark.conf.unset(name)


@pytest.mark.parametrize("times", ["TIMESTAMP_MICROS", "INT96", "TIMESTAMP_MILLIS"])
def test_decimals_times_texts_nested_arrays_and_structs_arrive_with_null_filled(
    spark, store, tmp_path, settings, times
):
    settings("spark.sql.parquet.outputTimestampType", times)
    df = spark.sql(
        """
        SELECT cast(1.25 AS decimal(6,2)) d, cast(7 AS decimal(18,0)) i, cast(1.5 AS decimal(38,18)) big,
               date'1969-12-31' day, timestamp'2024-05-06 07:08:09.000001' at, timestamp_ntz'2024-05-06 07:08:09' local,
               'text' s, X'00FF' b, array(array(1S, 2S, 3S), array(4S, 5S, 6S)) n,
               array(timestamp'2024-01-01 00:00:00') ts,
               named_struct('a', 1.5D, 'in', named_struct('v', array('x', 'y'))) st, 1 y
        UNION ALL SELECT null, null, null, null, null, null, null, null, array(array(1S, 2S, 3S), null), null, null, 2
        """
    ).coalesce(1)
    fill = {
        "d": 0.5, "i": -1, "big": 2, "day": "2000-01-01", "at": "2000-01-01", "local": "2000-01-01", "s": "none",
        "b": "none", "n": -1, "ts": "2000-01-01", "st.a": -1.5, "st.in.v": "none",
    }  # fmt: skip
    selection = select(df.schema, feature_cols=None, label_cols=["y"], fill=fill, transformed=True)
    settings("spark.sql.session.timeZone", "UTC")
    manifest = prepare(df, selection, store, writing=WriteOptions(1, 0))
    assert load(store, manifest.path) == manifest
    wanted = {
        "d": ("float64", [1.25, 0.5]),
        "i": ("int64", [7, -1]),
        "big": ("object", [Decimal("1.5"), Decimal(2)]),
        "day": ("datetime64[D]", [date(1969, 12, 31), date(2000, 1, 1)]),
        "at": ("datetime64[us]", [datetime(2024, 5, 6, 7, 8, 9, 1), datetime(2000, 1, 1)]),  # noqa: DTZ001
        "local": ("datetime64[us]", [datetime(2024, 5, 6, 7, 8, 9), datetime(2000, 1, 1)]),  # noqa: DTZ001
        "s": ("object", ["text", "none"]),
        "b": ("object", [b"\x00\xff", b"none"]),
        "n": ("int16", [[[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [-1, -1, -1]]]),
        "ts": ("datetime64[us]", [[datetime(2024, 1, 1)], [datetime(2000, 1, 1)]]),  # noqa: DTZ001
        "st.a": ("float64", [1.5, -1.5]),
        "st.in.v": ("object", [["x", "y"], ["none", "none"]]),
        "y": ("int32", [1, 2]),
    }
    for found in (rows_of(store, manifest), directly(df, selection, tmp_path)):
        assert {name: (str(array.dtype), array.tolist()) for name, array in found.items()} == wanted


@pytest.mark.parametrize(
    "modes",
    [
        {"datetimeRebaseModeInWrite": "LEGACY", "outputTimestampType": "TIMESTAMP_MICROS"},
        {"datetimeRebaseModeInWrite": "EXCEPTION", "outputTimestampType": "TIMESTAMP_MICROS"},
        {"int96RebaseModeInWrite": "LEGACY"},
    ],
    ids=str,
)
def test_old_dates_and_timestamps_stay_the_same_whatever_calendar_the_session_writes(spark, store, settings, modes):
    for name, mode in modes.items():
        settings(f"spark.sql.parquet.{name}", mode)
    settings("spark.sql.session.timeZone", "UTC")
    df = spark.sql("SELECT date'1500-01-01' day, timestamp'1500-01-01 00:00:00' at, 1 y")
    selection = select(df.schema, feature_cols=None, label_cols=["y"], transformed=True)
    read = rows_of(store, prepare(df, selection, store, writing=WriteOptions(1, 0)))
    assert read["day"].tolist() == [date(1500, 1, 1)]
    assert read["at"].tolist() == [datetime(1500, 1, 1)]  # noqa: DTZ001


def only_y(batch):
    return {"y": batch["y"]}


@pytest.mark.parametrize(("column", "first"), [("day", "1582-10-15"), ("at", "1900-01-01"), ("days", "1582-10-15")])
def test_existing_files_with_old_times_in_the_julian_calendar_are_refused(spark, tmp_path, settings, column, first):
    settings("spark.sql.parquet.datetimeRebaseModeInWrite", "LEGACY")
    settings("spark.sql.session.timeZone", "UTC")
    settings("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    for url, day in ((old, "1500-01-01"), (new, "2024-05-06")):
        sql = f"SELECT date'{day}' day, timestamp'{day} 00:00:00' at, array(date'{day}') days, 1 y"
        spark.sql(sql).write.parquet(url)
    for url, names in ((new, [column, "y"]), (old, ["y"])):
        with closing(torch_loader(url, 1, columns=names, transformation_fn=only_y)) as rows:
            assert [batch["y"].tolist() for batch in rows] == [[1]]
    with pytest.raises(DataError, match=rf"Column '{column}' \(feature\) has values before {first} in .*LEGACY"):
        torch_loader(old, 1, columns=[column, "y"])


def test_vectors_stay_sparse_on_disk_and_are_delivered_as_requested(spark, store):
    vectors = [Vectors.dense([0, 1, 0, 2]), Vectors.sparse(4, {3: 5.0}), Vectors.sparse(4, {}), Vectors.dense([0] * 4)]
    rows = [(vector, vector, index) for index, vector in enumerate(vectors)]
    df = spark.createDataFrame(rows, VECTORS_AND_Y).coalesce(1)
    wanted = [vector.toArray().tolist() for vector in vectors]
    for compress, kinds in [(False, [1, 0, 0, 1]), (True, [0, 0, 0, 0])]:
        selection = select(df.schema, feature_cols=["v", "w"], label_cols=["y"], sparse_cols=["w"])
        manifest = prepare(df, selection, store, writing=WriteOptions(1, 0, compress=compress))
        assert [manifest.schema[name].entries for name in "vw"] == [None, 2]
        filesystem, place = store.arrow(f"{manifest.folder}/{manifest.train.files[0].path}")
        on_disk = parquet.read_table(place, filesystem=filesystem)
        assert [vector["type"] for vector in on_disk["v"].to_pylist()] == kinds
        assert [len(vector["values"]) for vector in on_disk["w"].to_pylist()][1:3] == [1, 0]
        found = rows_of(store, manifest)
        assert found["v"].tolist() == wanted
        assert columns.to_dense(found["w"], manifest.schema["w"]).tolist() == wanted


RAGGED = {
    "inner": ("array(array(1, 2), array(3))", "has inner arrays of length 1 and 2"),
    "over rows": ("array(array_repeat(1, id))", "has inner arrays of length 1 and 2"),
    "deepest": ("array(array(array(1), array(2, 3)))", "has inner arrays of length 1 and 2"),
    "beside NULL": ("array(NULL, array(array(1), array(2, 3)))", "has inner arrays of length 1 and 2"),
}


@pytest.mark.parametrize("case", RAGGED)
def test_ragged_nested_arrays_are_refused(spark, store, case):
    expression, message = RAGGED[case]
    df = spark.range(1, 3).selectExpr("cast(id AS int) id", "id AS y").selectExpr(f"{expression} AS x", "y")
    with pytest.raises(SchemaError, match=message):
        prepare_all(df, store, num_proc=1)
    assert_nothing_is_left(store)


def test_there_are_enough_row_groups_for_the_ranks(spark, store):
    df = spark.range(0, 100_000, 1, 1).select("id", *(functions.rand(seed).alias(f"x{seed}") for seed in range(8)))
    selection = select(df.schema, feature_cols=None, label_cols=["id"])
    small = prepare(df, selection, store, writing=WriteOptions(2, 0))
    one = prepare(df, selection, store, writing=WriteOptions(1, 0, partitions_per_process=1))
    assert len(one.train.block_rows()) < 3 < len(small.train.block_rows())
    assert prepare_module.row_group_bytes(df, WriteOptions(1, 0, row_group_bytes=12345)) == 12345
    for name in ("num_proc", "partitions_per_process", "row_group_bytes"):
        with pytest.raises(ConfigError, match=f"{name} is 0"):
            WriteOptions(**{"num_proc": 1, "seed": 0, name: 0})


def test_the_split_depends_on_content_and_seed_and_not_on_partitioning(spark, store):
    def held_out(df, seed):
        return set(rows_of(store, prepare_all(df, store, validation=0.25, seed=seed), "validation")["x"].tolist())

    first = held_out(numbers(spark, 400, 1), seed=1)
    assert first == held_out(numbers(spark, 400, 7).orderBy(functions.desc("x")), seed=1)
    assert first != held_out(numbers(spark, 400, 1), seed=2)
    assert first != held_out(numbers(spark, 400, 1), seed=-1)


@pytest.mark.parametrize("kind", ["boolean", "int", "double", "decimal(3,1)"])
def test_a_validation_column_determines_the_split_and_is_not_delivered(spark, store, kind):
    df = numbers(spark).withColumn("held out", (functions.col("x") % 5 == 0).cast("int").cast(kind))
    manifest = prepare_all(df, store, validation="held out")
    assert rows_of(store, manifest, "validation")["x"].tolist() == list(range(0, 100, 5))
    assert manifest.train.rows == 80
    assert manifest.schema.names() == ["x", "y"]


def test_a_validation_column_with_null_or_other_values_is_refused_with_counts(spark, store):
    df = numbers(spark).withColumn("v", functions.expr("CASE WHEN x < 3 THEN NULL WHEN x < 10 THEN 2 ELSE 0 END"))
    with pytest.raises(DataError, match="column 'v' has 3 rows with NULL and 7 rows with values other than 0 and 1"):
        prepare_all(df, store, validation="v")
    assert_nothing_is_left(store)


def test_two_datasets_in_one_store_never_see_each_other(spark, store):
    first = prepare_all(numbers(spark, 10, 2), store)
    second = prepare_all(numbers(spark, 20, 2).withColumn("x", -functions.col("x")), store)
    assert first.dataset_id != second.dataset_id
    assert rows_of(store, first)["x"].tolist() == list(range(10))
    assert rows_of(store, second)["x"].tolist() == [-x for x in range(20)]


def test_concurrent_preparations_keep_their_rows_apart(spark, store):
    manifests = {}

    def prepare_one(index):
        df = numbers(spark, 200, 2).withColumn("x", functions.col("x") + 1000 * index)
        manifests[index] = prepare_all(df, store, validation=0.5)

    threads = [threading.Thread(target=prepare_one, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for index in range(3):
        x = rows_of(store, manifests[index])["x"]
        assert (x // 1000 == index).all()
        assert (np.diff(x) > 0).all()


def test_weights_and_nan_are_delivered_as_data(spark, store):
    df = numbers(spark, 4, 1).withColumn("w", functions.lit(float("nan")))
    columns = rows_of(store, prepare_all(df, store, weight="w"))
    assert columns["w"].dtype == np.float64
    assert np.isnan(columns["w"]).all()


def test_many_row_groups_are_read_in_order(spark, store):
    # About 24 MiB in one task: more than one row group.
    df = spark.range(0, 6000, 1, 1).select(
        functions.col("id").alias("y"),
        functions.transform(
            functions.sequence(functions.lit(1), functions.lit(1000)), lambda i: functions.rand(3).cast("float") + i
        ).alias("x"),
    )
    manifest = prepare_all(df, store)
    assert len(manifest.train.block_rows()) > 1
    assert rows_of(store, manifest)["y"].tolist() == list(range(6000))
    assert head(store, manifest, 5)["x"].shape == (5, 1000)


ARRAY = t.StructType([t.StructField("a", t.ArrayType(t.FloatType())), t.StructField("y", t.IntegerType())])


FAULTS = {
    "null array": ([([1.0, 2.0], 0), (None, 1), (None, 1)], DataError, r"'a' \(feature\) has 2 NULL values. Drop"),
    "null inside": ([([1.0, 2.0], 0), ([1.0, None], 1)], DataError, r"'a' \(feature\) has 1 NULL value inside its"),
    "ragged": (
        [([1.0, 2.0], 0), ([1.0, 2.0, 3.0], 1)],
        SchemaError,
        r"'a' \(feature\) has rows of length 2 and 3;.* Pad",
    ),
    "empty one": ([([1.0, 2.0], 0), ([], 1)], SchemaError, "rows of length 0 and 2"),
    "empty all": ([([], 0), ([], 1)], SchemaError, "holds only empty arrays"),
    "null scalar": ([([1.0, 2.0], 0), ([1.0, 2.0], None)], DataError, r"'y' \(label\) has 1 NULL value. Drop"),
}


@pytest.mark.parametrize(
    ("fault", "validation"),
    [
        *((fault, None) for fault in FAULTS),
        ("ragged", "held_out"),
        *(pytest.param(fault, "held_out", marks=pytest.mark.soak) for fault in FAULTS if fault != "ragged"),
    ],
)
def test_invalid_rows_are_refused_without_leftovers(spark, store, fault, validation):
    rows, error, message = FAULTS[fault]
    # With validation, the first row is held out, so that a check must cover both splits to detect the fault.
    df = spark.createDataFrame([*rows, rows[0]], ARRAY).coalesce(1)
    df = df.withColumn("held_out", functions.monotonically_increasing_id() == 0)
    with pytest.raises(error, match=message):
        prepare_all(df, store, features=["a"], validation=validation)
    assert_nothing_is_left(store)


@pytest.fixture
def small_disk(tmp_path):
    """Return the folder of a file system of one MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    # Spark may not have closed the files of a failed task.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_named_and_leaves_no_files(spark, small_disk):
    store = LocalStore(str(small_disk / "store"))
    df = spark.range(1000).selectExpr("transform(sequence(1, 500), i -> rand(3)) AS a", "double(id) AS y")
    with pytest.raises(StoreError, match=rf"Spark cannot write the rows to {store.url}: No space left on device\."):
        prepare_all(df, store, features=["a"])
    assert_nothing_is_left(store)


class StoreOfOtherMachines(LocalStore):
    """Spark writes to a folder that the driver does not see, like a folder that is not shared."""

    def spark_url(self, path):
        return f"file://{self.root}-elsewhere/{path}"


class StoreOfOneMachine(LocalStore):
    """The driver does not see the files of one task, as if its executor did not share the folder."""

    def list(self, path):
        return [found for found in super().list(path) if "part-00001-" not in found]


@pytest.mark.parametrize("validation", [None, 0.5])
def test_rows_missing_from_the_store_are_distinguished_from_an_empty_dataframe(spark, tmp_path, validation):
    store = StoreOfOtherMachines(str(tmp_path / "store"))
    with pytest.raises(StoreError, match=rf"has 1 row, but 0 of them arrived in {store.url}\. Check that the driver"):
        prepare_all(spark.createDataFrame([([1.0], 0)], ARRAY), store, validation=validation)
    for empty in (spark.createDataFrame([], ARRAY), numbers(spark).where("x < 0"), numbers(spark).limit(0)):
        with pytest.raises(DataError, match=r"^The DataFrame has no rows to train on\."):
            prepare_all(empty, store, validation=validation)


@pytest.mark.parametrize("validation", [None, 0.5])
def test_a_store_with_missing_rows_is_refused(spark, tmp_path, validation):
    store = StoreOfOneMachine(str(tmp_path / "store"))
    with pytest.raises(
        StoreError, match=rf"has 100 rows, but 6\d of them arrived in {store.url}\. Check that the driver"
    ):
        prepare_all(numbers(spark), store, validation=validation)
    assert_nothing_is_left(store)


class StoreWithLateTasks(LocalStore):
    """A failed second attempt of a task finishes its file before the driver lists the folder.

    With ``by_spark``, the attempt is one of Spark's own writer, whose files are in a temporary folder until the commit.
    """

    by_spark = False

    def spark_url(self, path):
        return super().spark_url(path) if self.by_spark else None

    def list(self, path):
        found = super().list(path)
        if not path.endswith("/rows") or not found:
            return found
        whole = Path(self.root, found[-1])
        late = whole.with_name(whole.name.replace("-c000", "-9999-c000"))
        if self.by_spark:
            late = Path(self.root, path, "_temporary/0/_temporary/attempt_1", whole.relative_to(Path(self.root, path)))
        late.parent.mkdir(parents=True, exist_ok=True)
        late.write_bytes(whole.read_bytes())
        return super().list(path)


class StoreWithLateTasksOfSpark(StoreWithLateTasks):
    by_spark = True


@pytest.mark.parametrize("kind", [StoreWithLateTasks, StoreWithLateTasksOfSpark])
@pytest.mark.parametrize("validation", [None, 0.5])
def test_only_the_files_of_successful_tasks_count(spark, tmp_path, kind, validation):
    store = kind(str(tmp_path / "store"))
    manifest = prepare_all(numbers(spark), store, validation=validation)
    splits = ["train"] if validation is None else ["train", "validation"]
    rows = np.concatenate([rows_of(store, manifest, split)["x"] for split in splits])
    assert sorted(rows.tolist()) == list(range(100))


def test_too_few_rows_are_refused_with_both_numbers(spark, store):
    with pytest.raises(DataError, match=r"^The DataFrame has no rows to train on\. Check the filters"):
        prepare_all(spark.createDataFrame([], ARRAY), store)
    with pytest.raises(DataError, match="The DataFrame has no rows to train on"):
        prepare_all(spark.createDataFrame([], ARRAY), store, validation=0.5)
    with pytest.raises(DataError, match="There are 2 rows to train on but num_proc is 3"):
        prepare_all(numbers(spark, 2), store, num_proc=3)
    assert_nothing_is_left(store)


def test_a_vector_that_is_null_or_of_another_length_is_refused(spark, store):
    schema = t.StructType([t.StructField("v", VectorUDT()), t.StructField("y", t.IntegerType())])
    for second, message in [(None, "Column 'v' .* has 1 NULL"), (Vectors.sparse(4, {0: 1.0}), "length 2 and 4")]:
        df = spark.createDataFrame([(Vectors.dense([1, 2]), 0), (second, 1)], schema)
        with pytest.raises(DataError, match=message):
            prepare_all(df, store)
    assert_nothing_is_left(store)


def test_an_empty_split_is_refused(spark, store):
    with pytest.raises(DataError, match="No row is held out: validation=1e-06 selects none of 100 rows"):
        prepare_all(numbers(spark), store, validation=1e-6)
    with pytest.raises(DataError, match="validation column 'z' selects none of 100 rows"):
        prepare_all(numbers(spark).withColumn("z", functions.lit(0)), store, validation="z")
    with pytest.raises(
        DataError, match=r"No row is left to train on: validation column 'o' holds out every row \(100\)"
    ):
        prepare_all(numbers(spark).withColumn("o", functions.lit(True)), store, validation="o")
    assert_nothing_is_left(store)


def test_a_failing_lineage_raises_its_own_error_and_leaves_no_files(spark, store):
    df = numbers(spark).withColumn("x", functions.expr("IF(x < 99, x, raise_error('row 99 is bad'))"))
    with pytest.raises(Exception, match="row 99 is bad"):
        prepare_all(df, store, validation=0.2)
    assert_nothing_is_left(store)


def test_a_streaming_dataframe_is_refused(spark, store):
    df = spark.readStream.format("rate").load().selectExpr("value AS x", "value AS y")
    with pytest.raises(DataError, match="A streaming DataFrame has no end"):
        prepare_all(df, store)


def test_unusable_columns_are_refused_by_name_without_a_job(spark):
    df = spark.createDataFrame([Row(x=1, name="a", y=1.0)])
    for chosen, message in [
        ({"feature_cols": ["X"], "case_sensitive": True}, "There is no column 'X' .* Did you mean 'x'"),
        (
            {"feature_cols": ["name"]},
            "Column 'name' has the type string, which cannot be a feature of a model: index or encode",
        ),
    ]:
        with pytest.raises(SchemaError, match=message):
            select(df.schema, label_cols=["y"], **chosen)
