"""Text columns that a transformation function converts to numbers, with every estimator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pyspark.sql import functions as sql

from sparkhvd import LightningEstimator, Store
from sparkhvd.errors import SchemaError
from tests.spark import trainings

pytestmark = pytest.mark.spark
WORDS = ("low", "middle", "high")


def with_ids(columns):
    """Replace each word by its index."""
    return {**columns, "b": np.array([WORDS.index(word) for word in columns["b"]], np.float64)}


@pytest.mark.parametrize(
    ("path", "framework"),
    [
        ("store", "keras"),
        ("direct", "torch"),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (("store", "torch"), ("store", "lightning"), ("direct", "lightning"), ("direct", "keras"))
        ),
    ],
)
def test_texts_are_converted_to_numbers_by_a_transformation_function(spark, tmp_path, framework, path):
    numbers = spark.range(40, numPartitions=1).selectExpr("id / 40.0D AS a", "id % 3 * 1.0D AS b", "a * 2 - b AS y")
    words = sql.array(*map(sql.lit, WORDS))
    texts = numbers.withColumn("b", sql.element_at(words, (sql.col("b") + 1).cast("int")))
    store = Store.create(str(tmp_path / "store")) if path == "store" else None
    options = {"num_proc": 1, "checkpoints": None, "epochs": 1}
    fitted = trainings.estimator(framework, store, transformation_fn=with_ids, **options).fit(texts)
    assert len(fitted.getHistory()) == 1
    if store is not None:  # without a Store, the order of the rows depends on their values
        plain = trainings.estimator(framework, store, **options).fit(numbers)
        assert trainings.weights(framework, fitted) == trainings.weights(framework, plain)
    predicted = fitted.transform(numbers).collect()
    assert np.isfinite([row.y__output for row in predicted]).all()
    with pytest.raises(SchemaError, match=r"'b' holds strings.* transform\(\) does not call transformation_fn"):
        fitted.transform(texts)


def by_name(columns):
    """Replace the columns by others, as a tokenizer does."""
    ids = np.array([[WORDS.index(word), 1] for word in columns["b"]])
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": columns["y"].astype(np.int64)}


@pytest.mark.parametrize("path", ["direct", pytest.param("store", marks=pytest.mark.soak)])
def test_a_lightning_module_is_trained_on_the_columns_that_a_transformation_function_returns(spark, tmp_path, path):
    from lightning.pytorch import LightningModule  # noqa: PLC0415

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(len(WORDS), 2)
            torch.nn.init.zeros_(self.words.weight)

        def forward(self, input_ids, attention_mask, labels=None):
            assert input_ids.dtype == attention_mask.dtype == torch.int64
            logits = (self.words(input_ids) * attention_mask.unsqueeze(-1))[:, 0]
            return {"logits": logits, "loss": labels is not None and torch.nn.functional.cross_entropy(logits, labels)}

        def training_step(self, batch, _number):
            assert sorted(batch) == ["attention_mask", "input_ids", "labels"]
            return self(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=3)

    rows = [(word, int(word == "high")) for word in WORDS for _ in range(4)]
    df = spark.createDataFrame(rows, "b string, y int").repartition(2)
    store = Store.create(str(tmp_path / "store")) if path == "store" else None
    options = {"num_proc": 2, "store": store, "batch_size": 6, "epochs": 1, "random_seed": 1, "verbose": 0}
    estimator = LightningEstimator(
        model=Classifier(), feature_cols=["b"], label_cols=["y"], transformation_fn=by_name, **options
    )
    fitted = estimator.fit(df)
    # One step over all 12 rows: a third of them has each word, and the gradient of a row is +-0.5.
    assert fitted.getModel().words.weight.tolist() == [[0.5, -0.5], [0.5, -0.5], [-0.5, 0.5]]
    tokens = spark.createDataFrame([([0, 1], [1, 1], 0), ([2, 1], [1, 1], 1)], "ids array<int>, mask array<int>, y int")
    predicted = fitted.setFeatureColumns(["ids", "mask", "y"]).transform(tokens.coalesce(1)).orderBy("y").collect()
    assert [row["prediction"].toArray().tolist() for row in predicted] == [[0.5, -0.5], [-0.5, 0.5]]
