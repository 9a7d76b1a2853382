from __future__ import annotations

import pytest
from pyspark.sql import functions

from sparkhvd.store import LocalStore


@pytest.fixture(scope="module", autouse=True)
def _start_ranks_quickly(warm_ranks):
    """Fork the ranks of all modules of this folder from a warm process."""


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
