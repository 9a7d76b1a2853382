"""Batches read by petastorm's own reader; ``make test-petastorm`` runs this in petastorm's environment."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

petastorm = pytest.importorskip("petastorm", reason="needs petastorm's own environment: make test-petastorm")

from sparkhvd.data import ParquetSource  # noqa: E402
from sparkhvd.data.external.locate import Access  # noqa: E402
from sparkhvd.data.external.parquet_files import open_existing  # noqa: E402
from sparkhvd.data.external.petastorm_reader import PetastormSource  # noqa: E402
from sparkhvd.errors import DataError  # noqa: E402
from sparkhvd.store import Store  # noqa: E402
from sparkhvd.world import World  # noqa: E402
from tests.s3_server import BUCKET, running_s3  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # petastorm uses deprecated functions of many packages

DATASET = Path(__file__).parent / "dataset"
MOTO_PYTHON = Path(__file__).parents[2] / ".venv/bin/python"  # moto conflicts with petastorm
NUMERIC_COLUMNS = ["id", "matrix", "packed", "image", "depth"]


def world_of(rank, size):
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


def source_of(files, rank=0, size=1, batch=3, **options):
    options = {"seed": 1, "shuffle": False, **options}
    return PetastormSource(files.store, files.manifest, "train", world_of(rank, size), batch, **options)


@pytest.fixture(scope="module")
def packed():
    return open_existing(str(DATASET), feature_cols=NUMERIC_COLUMNS, label_cols=["y"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    for number, rows in enumerate([5, 7, 4]):
        ids = np.arange(number * 10, number * 10 + rows)
        table = pa.table({"x": ids.astype("float32"), "a": list(np.stack([ids, -ids], 1)), "y": ids % 2 == 0})
        parquet.write_table(table, folder / f"part-{number}.parquet", row_group_size=3)
    return open_existing(str(folder), feature_cols=["x", "a"], label_cols=["y"])


def check_against_the_native_reader(files):
    native_batches = list(
        ParquetSource(files.store, files.manifest, "train", World(), 3, seed=0, shuffle=False).epoch(0)
    )
    petastorm_batches = list(source_of(files).epoch(0))
    assert len(petastorm_batches) == len(native_batches) == source_of(files).steps()
    for batch, native_batch in zip(petastorm_batches, native_batches, strict=True):
        assert list(batch.columns) == list(native_batch.columns)
        assert (batch.rows, batch.global_rows) == (native_batch.rows, native_batch.global_rows)
        for name, array in batch.columns.items():
            np.testing.assert_array_equal(array, native_batch.columns[name])
            assert array.dtype == native_batch.columns[name].dtype


def test_petastorm_and_the_native_reader_return_the_same_rows(packed):
    check_against_the_native_reader(packed)


def test_petastorm_reads_s3_with_the_storage_options_of_the_native_reader(plain):
    first = plain.manifest.train.files[0].path
    plain_folder = Path(plain.store.url.removeprefix("file://"), plain.manifest.folder, first).parent
    with running_s3(str(MOTO_PYTHON)) as server:
        url = f"s3://{BUCKET}/data"
        store = Store.create(url, storage_options=server.options)
        for name, folder in (("packed", DATASET), ("plain", plain_folder)):
            for file in folder.iterdir():
                with store.open(f"{name}/{file.name}", "wb") as copy:
                    copy.write(file.read_bytes())
        access = Access(storage_options=server.options)
        for name, features in (("packed", NUMERIC_COLUMNS), ("plain", ["x", "a"])):
            files = open_existing(f"{url}/{name}", feature_cols=features, label_cols=["y"], access=access)
            assert files.store.url == url
            check_against_the_native_reader(files)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("shuffle", [False, True])
def test_all_ranks_have_equal_steps_and_every_row_is_read_once(plain, size, shuffle):
    ranks = [list(source_of(plain, rank, size, 2, shuffle=shuffle).epoch(1)) for rank in range(size)]
    assert {len(batches) for batches in ranks} == {source_of(plain, 0, size, 2).steps()}
    values = np.concatenate([batch.columns["x"] for batches in ranks for batch in batches])
    assert sorted(values.tolist()) == [*range(5), *range(10, 17), *range(20, 24)]
    for step in zip(*ranks, strict=True):
        assert {batch.global_rows for batch in step} == {sum(batch.rows for batch in step)}
    for batches in ranks:
        for batch in batches:
            np.testing.assert_array_equal(batch.columns["a"], np.stack([batch.columns["x"], -batch.columns["x"]], 1))


def test_the_order_of_rows_depends_only_on_seed_and_epoch(plain):
    def order(epoch, **options):
        return [batch.columns["x"].tolist() for batch in source_of(plain, shuffle=True, **options).epoch(epoch)]

    assert order(0) == order(0) != order(1)
    assert order(0) != order(0, seed=2)
    whole = order(0)
    resumed = [batch.columns["x"].tolist() for batch in source_of(plain, shuffle=True).epoch(0, first_step=2)]
    assert resumed == whole[2:]


@pytest.fixture(scope="module")
def spark():
    from pyspark.sql import SparkSession  # noqa: PLC0415

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")  # the JVM lives for seconds
        session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
        yield session
        session.stop()


def test_the_ranks_of_a_spark_job_share_the_rows(spark):
    import sparkhvd  # noqa: PLC0415

    def rows_of_rank(path):
        from sparkhvd.comm import session  # noqa: PLC0415

        session.init()
        files = open_existing(path, feature_cols=["id", "image"], label_cols=["y"])
        source = PetastormSource(files.store, files.manifest, "train", session.current().world, 3, seed=1, shuffle=True)
        batches = list(source.epoch(0))
        session.shutdown()
        return [number for batch in batches for number in batch.columns["id"].tolist()], len(batches)

    ranks = sparkhvd.run(rows_of_rank, (str(DATASET),), num_proc=2, spark=spark)
    assert sorted(number for rows, _ in ranks for number in rows) == list(range(10))
    assert [steps for _, steps in ranks] == [2, 2]


def test_an_estimator_learns_the_same_weights_with_petastorms_reader(spark):
    import torch  # noqa: PLC0415

    from sparkhvd import TorchEstimator  # noqa: PLC0415

    def weights(reader):
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        estimator = TorchEstimator(
            num_proc=2,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
            loss=torch.nn.functional.mse_loss,
            feature_cols=["id"],
            label_cols=["y"],
            batch_size=10,  # one step per epoch, over all rows, however the ranks share them
            epochs=3,
            random_seed=1,
            verbose=0,
        )
        trained = estimator.fit_on_parquet(path=str(DATASET), reader=reader)
        assert [entry["epoch"] for entry in trained.getHistory()] == [0, 1, 2]
        return [model.weight.item(), model.bias.item()], [p.item() for p in trained.getModel().parameters()]

    initial, learned = weights("petastorm")
    assert learned == pytest.approx(weights("native")[1], rel=1e-5)
    assert learned != pytest.approx(initial, rel=1e-3)


def test_the_oldest_spark_fits_by_both_data_paths_predicts_and_saves(spark, tmp_path):
    """Fit, transform, save and load with the oldest versions of Spark and Arrow; the other tests use newer ones."""
    import torch  # noqa: PLC0415
    from pyspark.ml import Pipeline, PipelineModel  # noqa: PLC0415
    from pyspark.ml.feature import VectorAssembler  # noqa: PLC0415

    from sparkhvd import TorchEstimator  # noqa: PLC0415

    rows = spark.range(40, numPartitions=2).selectExpr("id / 40.0D AS a", "id % 7 / 7.0D AS b", "a - b AS y").cache()

    def fit(store):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        estimator = TorchEstimator(
            num_proc=2,
            store=store,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=torch.nn.functional.mse_loss,
            feature_cols=["v"],
            label_cols=["y"],
            batch_size=20,  # one step per epoch, over all rows, however the ranks share them
            epochs=2,
            verbose=0,
        )
        return Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="v"), estimator]).fit(rows)

    def predictions(model):
        return [row["y__output"] for row in model.transform(rows).select("y__output").collect()]

    assert spark.version.startswith("3.5.")
    fitted, prepared = fit(None), fit(Store.create(str(tmp_path / "store")))
    fitted.save(str(tmp_path / "model"))
    loaded = PipelineModel.load(str(tmp_path / "model"))
    module = loaded.stages[-1].getModel()
    for one, other in zip(module.parameters(), prepared.stages[-1].getModel().parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        wanted = module(torch.tensor([[row.a, row.b] for row in rows.collect()], dtype=torch.float32))[:, 0]
    assert predictions(fitted) == predictions(loaded) == pytest.approx(wanted.tolist(), rel=1e-5)


def test_rows_that_petastorm_loses_or_repeats_are_detected(plain, monkeypatch):
    source = source_of(plain)
    original = source._read
    monkeypatch.setattr(source, "_read", lambda: iter(list(original())[:-1]))
    with pytest.raises(DataError, match=r"petastorm read 15 rows of .* for rank 0, but the Parquet footers have 16"):
        list(source.epoch(0))
    monkeypatch.setattr(source, "_read", lambda: iter([*original(), *original()]))
    with pytest.raises(DataError, match="petastorm read 17 rows"):
        list(source.epoch(0))
