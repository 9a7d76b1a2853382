"""A check that Spark encrypts a job's secret; otherwise ``SPARKHVD_ENCRYPT`` does not protect the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkhvd.data.spark.job import is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def unencrypted_spark(spark: SparkSession) -> str:
    """Return a warning if Spark sends the job's secret unencrypted; empty otherwise."""

    def is_on(name: str) -> bool:
        return str(spark.conf.get(name, "false")).lower() == "true"

    if is_on("spark.ssl.rpc.enabled") or (is_on("spark.authenticate") and is_on("spark.network.crypto.enabled")):
        return ""
    if is_local(str(spark.conf.get("spark.master", ""))):  # nothing leaves the machine
        return ""
    return (
        "SPARKHVD_ENCRYPT is on, but Spark sends the job's secret to the executors unencrypted. Anyone who reads the "
        "secret can decrypt the rest. Set spark.authenticate and spark.network.crypto.enabled, or "
        "spark.ssl.rpc.enabled."
    )
