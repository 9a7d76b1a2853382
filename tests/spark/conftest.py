from __future__ import annotations

import pytest
from pyspark.sql import functions

from sparkhvd import KerasEstimator, LightningEstimator, TorchEstimator
from sparkhvd.store import LocalStore


@pytest.fixture(scope="module", autouse=True)
def _start_ranks_quickly(warm_ranks):
    """Fork the ranks of all modules of this folder from a warm process."""


@pytest.fixture(scope="session", autouse=True)
def _import_for_many_ranks():
    """Let the warm processes import what most ranks import because a test module imports it."""
    with pytest.MonkeyPatch.context() as patch:
        for estimator in (KerasEstimator, LightningEstimator, TorchEstimator):
            patch.setattr(estimator, "preload", (*estimator.preload, "tests.spark.rank_imports"))
        yield


@pytest.fixture
def store(tmp_path):
    return LocalStore(str(tmp_path / "store"))


@pytest.fixture
def source(spark, tmp_path):
    """Return a folder of Parquet files, and a function that opens it as a new DataFrame."""
    folder = tmp_path / "source"
    spark.range(0, 40, 1, 2).selectExpr("id AS x", "cast(id % 3 AS double) AS y").write.parquet(str(folder))

    def read():
        return spark.read.parquet(str(folder)).where("x >= 0").withColumn("z", functions.col("x") * 2.5)

    return folder, read
