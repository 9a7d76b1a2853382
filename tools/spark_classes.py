"""Use the parts of Spark that the tests use, so that the JVM of this program can archive the classes that it loaded.

One JVM is driver, master and worker (``local-cluster``), and also serves Spark Connect. Executors are separate JVMs, so
jobs of a local session first load the executors' classes into this JVM.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pyspark.ml.feature import VectorAssembler
from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (pyspark's own habit)


def same(batches: Iterator[Any]) -> Iterator[Any]:
    yield from batches


def use(session: SparkSession, folder: Path) -> None:
    rows: DataFrame = session.range(16).select(
        "id",
        (F.col("id") * 0.5).alias("x"),
        F.array(F.lit(1.0), F.lit(2.0)).alias("values"),
        (F.col("id") % 2).cast("string").alias("text"),
        F.xxhash64("id").alias("hash"),
    )
    rows = VectorAssembler(inputCols=["x"], outputCol="vector").transform(rows)
    path = str(folder / "rows")
    rows.write.mode("overwrite").partitionBy("text").parquet(path)
    read = session.read.parquet(path).withColumn("numbers", vector_to_array("vector"))
    plus_one = F.pandas_udf(lambda column: column + 1, "double")
    read.select(plus_one("x"), "numbers", F.to_date(F.lit("2024-01-01"))).orderBy("x").collect()
    rows.select("id", "x").repartition(2).sortWithinPartitions("x").mapInArrow(same, "id long, x double").count()
    rows.select("id").coalesce(2).mapInArrow(same, "id long", barrier=True).repartition(1).collect()
    rows.createOrReplaceTempView("rows")
    session.sql("select count(*), sum(x) from rows join (select id as other from rows) on id = other").toPandas()


def main() -> None:
    for master in ("local[2]", "local-cluster[1,2,1024]"):
        builder = SparkSession.builder.master(master).config("spark.executor.memory", "700m")
        settings = {
            "spark.ui.enabled": "false",
            "spark.log.level": "OFF",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": "2",
            "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
            "spark.connect.grpc.binding.port": "0",
        }
        for name, value in settings.items():
            builder.config(name, value)
        session = builder.getOrCreate()
        with TemporaryDirectory() as folder:
            use(session, Path(folder))
        gateway = session.sparkContext._gateway  # noqa: SLF001  (there is no public way to its process)
        session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(120)  # the JVM writes the archive when it ends


if __name__ == "__main__":
    main()
