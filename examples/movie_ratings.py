"""Predicts how people rate films from embeddings of both, with a Keras model that has two named inputs.

    python examples/movie_ratings.py --num-proc 2

The data are 1,501 real ratings from MovieLens (30 people, 100 films) that come with PySpark.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import keras
import pyspark
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from sparkhvd import KerasEstimator, Store

RATINGS = Path(pyspark.__file__).parent / "data/mllib/als/sample_movielens_ratings.txt"


def main() -> int:
    options = parse_options()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("sparkhvd").setLevel(logging.INFO)
    spark = start_spark(options.num_proc, options.folder)
    try:
        train, held_out = ratings(spark).randomSplit([0.8, 0.2], seed=3)
        estimator = KerasEstimator(
            num_proc=options.num_proc,
            store=Store.create(str(options.folder / "store")),
            model=network(people=30, films=100),
            optimizer=keras.optimizers.Adam(0.01),
            loss="mean_squared_error",
            inputs={"person": "userId", "film": "movieId"},
            label_cols=["rating"],
            validation=0.1,
            batch_size=32,
            epochs=options.epochs,
            random_seed=3,
        )
        estimator.describe(train)
        model = estimator.fit(train)
        print(model.getHistory().to_pandas()[["loss", "val_loss"]].round(3).to_string())
        predicted = model.setOutputCols(["prediction"]).transform(held_out)
        predicted.orderBy(sql.desc("prediction")).show(5)
        error = RegressionEvaluator(labelCol="rating", metricName="rmse")
        average = train.agg(sql.avg("rating")).first()[0]
        always = error.evaluate(held_out.withColumn("prediction", sql.lit(average)))
        print(f"held-out error, the average for everybody: {always:.3f}")
        print(f"held-out error, embeddings:                {error.evaluate(predicted):.3f}")
    finally:
        spark.stop()
    return 0


def network(people: int, films: int) -> keras.Model:
    """Eight numbers for every person and every film, and a small network over both."""
    keras.utils.set_random_seed(3)
    person = keras.Input((1,), dtype="int32", name="person")
    film = keras.Input((1,), dtype="int32", name="film")
    # So few ratings would be learned by heart without a price on large numbers.
    price = keras.regularizers.L2(0.02)
    of_person = keras.layers.Flatten()(keras.layers.Embedding(people, 8, embeddings_regularizer=price)(person))
    of_film = keras.layers.Flatten()(keras.layers.Embedding(films, 8, embeddings_regularizer=price)(film))
    hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Concatenate()([of_person, of_film]))
    return keras.Model([person, film], keras.layers.Dense(1)(hidden))


def ratings(spark: SparkSession) -> DataFrame:
    parts = sql.split("value", "::")
    names = (("userId", "int"), ("movieId", "int"), ("rating", "float"))
    columns = [parts[place].cast(kind).alias(name) for place, (name, kind) in enumerate(names)]
    # Sent by the driver, so that executors need no copy of the file.
    lines = [(line,) for line in RATINGS.read_text().splitlines() if line]
    return (
        spark.createDataFrame(lines, "value string")
        .select(*columns)
        .withColumn("rating", sql.col("rating").cast("float"))
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=40, help="passes over the rows (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("ratings"), help="where all files go")
    return parser.parse_args()


def start_spark(slots: int, folder: Path) -> SparkSession:
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    return (
        SparkSession.builder.master(f"local[{slots}]")
        .appName("movie ratings")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", slots)
        .config("spark.local.dir", str(folder / "spark"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )


if __name__ == "__main__":
    sys.exit(main())
