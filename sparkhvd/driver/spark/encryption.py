"""What ``SPARKHVD_ENCRYPT`` is worth on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkhvd.data.spark.job import is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def readable_secret(spark: SparkSession) -> str:
    """A sentence where Spark sends what it carries, the job's secret included, as it is; empty where it does not."""

    def is_on(name: str) -> bool:
        return str(spark.conf.get(name, "false")).lower() == "true"

    if is_on("spark.ssl.rpc.enabled") or (is_on("spark.authenticate") and is_on("spark.network.crypto.enabled")):
        return ""
    if is_local(str(spark.conf.get("spark.master", ""))):  # nothing leaves the machine
        return ""
    return (
        "SPARKHVD_ENCRYPT is on, but Spark, which carries the job's secret to the executors, does not encrypt what it "
        "sends. Whoever reads that can read the rest; set spark.authenticate and spark.network.crypto.enabled, or "
        "spark.ssl.rpc.enabled."
    )
