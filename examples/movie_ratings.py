"""Predict film ratings from embeddings of people and films, two categorical columns, in any of the three frameworks.

    python examples/movie_ratings.py --framework torch lightning keras

The data are 1,501 real ratings from MovieLens (30 people, 100 films) that come with PySpark. A framework is imported
only in the functions that use it, so you need only one of the three.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from sparkhvd import KerasEstimator, LightningEstimator, Store, TorchEstimator

if TYPE_CHECKING:
    import keras
    import torch

RATINGS = Path(pyspark.__file__).parent / "data/mllib/als/sample_movielens_ratings.txt"
PEOPLE, FILMS = 30, 100
WIDTH = 8  # size of the embedding of a person or a film
# Without weight decay, the embeddings would memorize so few ratings.
WEIGHT_DECAY = 0.02


def main() -> int:
    options = parse_options()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("sparkhvd").setLevel(logging.INFO)
    spark = start_spark(options.num_proc, options.folder)
    try:
        train, held_out = ratings(spark).randomSplit([0.8, 0.2], seed=3)
        # The parameters of all three estimators. Each function below adds those of one framework.
        common = {
            "num_proc": options.num_proc,
            "store": Store.create(str(options.folder / "store")),
            "label_cols": ["rating"],
            "output_cols": ["prediction"],
            "validation": 0.1,
            "batch_size": 32,
            "epochs": options.epochs,
            "random_seed": 3,
        }
        error = RegressionEvaluator(labelCol="rating", metricName="rmse")
        average = train.agg(sql.avg("rating")).first()[0]
        errors = {"the average for everybody": error.evaluate(held_out.withColumn("prediction", sql.lit(average)))}
        # Keras comes last: TensorFlow must be imported after the modules that PyTorch's optimizers import.
        for framework in sorted(options.framework, key=list(ESTIMATORS).index):
            estimator = ESTIMATORS[framework](common)
            estimator.describe(train)
            model = estimator.fit(train)
            print(model.getHistory().to_pandas()[["loss", "val_loss"]].round(3).to_string())
            predicted = model.transform(held_out)
            predicted.orderBy(sql.desc("prediction")).show(5)
            errors[f"embeddings, {framework}"] = error.evaluate(predicted)
    finally:
        spark.stop()
    for name, value in errors.items():
        print(f"held-out error, {name + ':':<27}{value:.3f}")
    return 0


def torch_estimator(common: dict[str, Any]) -> TorchEstimator:
    import torch

    network = torch_network()
    return TorchEstimator(
        model=network,
        optimizer=torch_optimizer(network),
        loss=torch.nn.functional.mse_loss,
        inputs={"person": "userId", "film": "movieId"},  # the names of forward's arguments
        **common,
    )


def torch_network() -> torch.nn.Module:
    """Return a small network on top of the embeddings of a person and a film."""
    import torch

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.people = torch.nn.Embedding(PEOPLE, WIDTH)
            self.films = torch.nn.Embedding(FILMS, WIDTH)
            self.layers = torch.nn.Sequential(torch.nn.Linear(2 * WIDTH, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
            for layer in (self.layers[0], self.layers[2]):  # Keras' initial weights suit so few ratings better
                torch.nn.init.xavier_uniform_(layer.weight)
                torch.nn.init.zeros_(layer.bias)

        def forward(self, person: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
            return self.layers(torch.cat([self.people(person), self.films(film)], dim=1)).squeeze(1)

    torch.manual_seed(3)
    return Network()


def torch_optimizer(network: torch.nn.Module) -> torch.optim.Optimizer:
    import torch

    embeddings = [*network.people.parameters(), *network.films.parameters()]
    groups = [{"params": embeddings, "weight_decay": WEIGHT_DECAY}, {"params": network.layers.parameters()}]
    return torch.optim.Adam(groups, lr=0.01)


def lightning_estimator(common: dict[str, Any]) -> LightningEstimator:
    import lightning.pytorch as lightning
    import torch

    class Ratings(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = torch_network()

        def forward(self, person: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
            return self.network(person, film)

        def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self(batch["userId"], batch["movieId"]), batch["rating"])

        def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
            self.log("val_loss", self.training_step(batch, index))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch_optimizer(self.network)

    return LightningEstimator(model=Ratings(), feature_cols=["userId", "movieId"], **common)


def keras_estimator(common: dict[str, Any]) -> KerasEstimator:
    import keras

    return KerasEstimator(
        model=keras_network(),
        optimizer=keras.optimizers.Adam(0.01),
        loss="mean_squared_error",
        inputs={"person": "userId", "film": "movieId"},  # the names of the model's inputs
        **common,
    )


def keras_network() -> keras.Model:
    """Return the same network in Keras."""
    import keras

    keras.utils.set_random_seed(3)
    person = keras.Input((1,), dtype="int32", name="person")
    film = keras.Input((1,), dtype="int32", name="film")
    # Half of the factor is the same weight decay, because the gradient of w ** 2 is 2 * w. As in PyTorch, embeddings
    # start with a standard deviation of 1.
    settings = {
        "embeddings_regularizer": keras.regularizers.L2(WEIGHT_DECAY / 2),
        "embeddings_initializer": keras.initializers.RandomNormal(stddev=1.0),
    }
    person_vector = keras.layers.Flatten()(keras.layers.Embedding(PEOPLE, WIDTH, **settings)(person))
    film_vector = keras.layers.Flatten()(keras.layers.Embedding(FILMS, WIDTH, **settings)(film))
    hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Concatenate()([person_vector, film_vector]))
    return keras.Model([person, film], keras.layers.Dense(1)(hidden))


ESTIMATORS = {"torch": torch_estimator, "lightning": lightning_estimator, "keras": keras_estimator}


def ratings(spark: SparkSession) -> DataFrame:
    parts = sql.split("value", "::")
    names = (("userId", "int"), ("movieId", "int"), ("rating", "float"))
    columns = [parts[index].cast(kind).alias(name) for index, (name, kind) in enumerate(names)]
    # The driver sends the ratings, so executors need no copy of the file.
    lines = [(line,) for line in RATINGS.read_text().splitlines() if line]
    return (
        spark.createDataFrame(lines, "value string")
        .select(*columns)
        .withColumn("rating", sql.col("rating").cast("float"))
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", nargs="+", choices=ESTIMATORS, default=["torch"], help="one or more")
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
