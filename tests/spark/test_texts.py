"""Text columns that a transformation function converts to numbers, with every estimator."""

from __future__ import annotations

import numpy as np
import pytest
from pyspark.sql import functions as sql

from sparkhvd import Store
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
    numbers = spark.range(40).selectExpr("id / 40.0D AS a", "id % 3 * 1.0D AS b", "a * 2 - b AS y")
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
