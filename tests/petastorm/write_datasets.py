"""Write the small petastorm dataset that the tests read. Run this program in petastorm's own environment:

python tests/petastorm/write_datasets.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec, ScalarCodec
from petastorm.etl.dataset_metadata import materialize_dataset
from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
from pyspark.sql import SparkSession
from pyspark.sql.types import DoubleType, IntegerType, StringType

ROWS = 10
SCHEMA = Unischema(
    "Tested",
    [
        UnischemaField("id", np.int32, (), ScalarCodec(IntegerType()), False),
        UnischemaField("y", np.float64, (), ScalarCodec(DoubleType()), False),
        UnischemaField("name", np.str_, (), ScalarCodec(StringType()), False),
        UnischemaField("matrix", np.float32, (2, 3), NdarrayCodec(), False),
        UnischemaField("packed", np.int16, (4,), CompressedNdarrayCodec(), False),
        UnischemaField("open", np.uint8, (None, 2), NdarrayCodec(), False),
        UnischemaField("image", np.uint8, (5, 4, 3), CompressedImageCodec("png"), False),
        UnischemaField("depth", np.uint16, (3, 2), CompressedImageCodec("png"), False),
    ],
)


def row(index: int) -> dict[str, object]:
    """Return the values that ``tests/unit/data/external/test_petastorm_datasets.py`` expects."""
    return {
        "id": index,
        "y": index / 2,
        "name": f"row {index}",
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3) + index,
        "packed": np.full(4, -index, np.int16),
        "open": np.full((3, 2), index, np.uint8),
        "image": (np.arange(60).reshape(5, 4, 3) * 4 + index).astype(np.uint8),
        "depth": np.arange(6, dtype=np.uint16).reshape(3, 2) * 10_000 + index,
    }


def main(folder: str) -> None:
    target = Path(folder).absolute()
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    with materialize_dataset(spark, f"file://{target}", SCHEMA, 1):
        rows = spark.sparkContext.parallelize(range(ROWS), 2).map(lambda i: dict_to_spark_row(SCHEMA, row(i)))
        frame = spark.createDataFrame(rows, SCHEMA.as_spark_schema())
        frame.write.mode("overwrite").parquet(f"file://{target}")
    for leftover in [*target.glob(".*.crc"), target / "_SUCCESS"]:
        leftover.unlink()


if __name__ == "__main__":
    main(sys.argv[1])
