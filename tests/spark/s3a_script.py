"""Run by test_stores.py in a separate process: only a new session takes the jars of hadoop-aws."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import s3fs
from pyspark.sql import SparkSession

from sparkhvd import Store, TorchModel
from sparkhvd.data.spark.settings import spark_can_write
from tests import lines
from tests.s3_server import BUCKET
from tests.scripts import print_results

OTHER_BUCKET = f"{BUCKET}-named-by-options"


def session(jars: Path, options: dict) -> SparkSession:
    """Return a session whose connector can reach one bucket; only a Store has the options for the other bucket."""
    builder = SparkSession.builder.master("local[2]").config("spark.jars", ",".join(map(str, jars.glob("*.jar"))))
    settings = {
        "access.key": options["key"],
        "secret.key": options["secret"],
        "endpoint": options["endpoint_url"],
        "endpoint.region": options["client_kwargs"]["region_name"],
        "path.style.access": "true",
    }
    for name, value in settings.items():
        builder.config(f"spark.hadoop.fs.s3a.bucket.{BUCKET}.{name}", value)
    return builder.config("spark.ui.enabled", "false").config("spark.log.level", "ERROR").getOrCreate()


def trained(spark: SparkSession, store: Store, files: s3fs.S3FileSystem) -> dict[str, object]:
    """Return the results of a fit with held-out rows, whose model is saved in and loaded from the Store."""
    points = lines.points(spark)
    model = lines.estimator(store, validation=0.25).fit(points)
    model.write().within(store).save("saved/model")
    rows = TorchModel.read().within(store).load("saved/model").transform(points).select("y", "y__output").collect()
    return {
        "can write": spark_can_write(spark, store.spark_url("rows")),
        "errors": [abs(row.y - row.y__output) for row in rows],
        "validation": model.trained.history[-1].validation["loss"],
        "files": [path.rpartition("/")[2] for path in files.find(store.url.removeprefix("s3://"))],
    }


def main(jars: str, options: dict) -> None:
    files = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    files.call_s3("create_bucket", Bucket=OTHER_BUCKET)
    spark = session(Path(jars), options)
    try:
        stores = {"spark": Store.create(f"s3a://{BUCKET}/a store")}
        stores["options"] = Store.create(f"s3a://{OTHER_BUCKET}/a store", storage_options=options)
        results = {by: trained(spark, store, files) for by, store in stores.items()}
        model = TorchModel.load(f"s3a://{BUCKET}/a store/saved/model")
        results["loaded by its URL"] = model.transform(lines.points(spark)).count()
    finally:
        spark.stop()
    print_results(results)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
