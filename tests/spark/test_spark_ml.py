"""Estimators in Spark ML's pipelines and tuning."""

from __future__ import annotations

import gc
import logging
from unittest import mock

import pytest
import torch
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit

from sparkhvd import Store, TorchEstimator
from sparkhvd.errors import ParamError
from sparkhvd.estimators.api import estimator as estimator_api

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def line(spark, tmp_path_factory):
    """Return rows of y = 2a + b from a file, so that later fits reuse the prepared rows."""
    folder = str(tmp_path_factory.mktemp("line") / "parquet")
    spark.range(60).selectExpr("id / 60.0D AS a", "id % 7 / 7.0D AS b").selectExpr("*", "2 * a + b AS y").write.parquet(
        folder
    )
    return spark.read.parquet(folder)


def estimator(**more):
    torch.manual_seed(3)
    model = torch.nn.Linear(2, 1)
    params = {
        "num_proc": 2,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": torch.nn.functional.mse_loss,
        "feature_cols": ["v"],
        "label_cols": ["y"],
        "batch_size": 5,
        "random_seed": 3,
        "verbose": 0,
    }
    return TorchEstimator(**{**params, **more})


@pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool:ResourceWarning")  # pyspark's
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_parameter_grid_is_searched_in_parallel_and_fits_share_prepared_rows(line, tmp_path, caplog):
    """Two parallel fits of three ranks need six of four slots: they must take turns without a deadlock."""
    caplog.set_level(logging.INFO, "sparkhvd.data")
    store = Store.create(str(tmp_path))
    mine = estimator(store=store, num_proc=3)
    pipeline = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="v"), mine])
    grid = ParamGridBuilder().addGrid(mine.epochs, [1, 12]).build()
    evaluator = RegressionEvaluator(labelCol="y", predictionCol="y__output", metricName="rmse")
    search = CrossValidator(
        estimator=pipeline, estimatorParamMaps=grid, evaluator=evaluator, parallelism=2, numFolds=2, seed=1
    )
    with mock.patch.object(estimator_api, "track") as tracked:
        best_pipeline = search.fit(line)
    parts = sorted(call.args[3].name for call in tracked.call_args_list)
    assert parts == ["all rows", *["fold 1 of 2"] * 2, *["fold 2 of 2"] * 2], "the names of the fits' MLflow runs"
    few, many = best_pipeline.avgMetrics
    assert many < few / 2
    best = best_pipeline.bestModel.stages[-1]
    assert len(best.getHistory()) == 12
    assert len({path.split("/")[1] for path in store.list("runs")}) == 5, "every fit has its own run"
    messages = [record.getMessage() for record in caplog.records]
    prepared = [line.split()[2].rstrip(":") for line in messages if line.startswith("Prepared dataset")]
    assert len(prepared) == 3, "one dataset per fold and one with all rows"
    assert sum("already holds these rows" in line for line in messages) == 2
    assert {path.split("/")[1] for path in store.list("datasets")} == {prepared[-1]}, "the other datasets are removed"
    assert evaluator.evaluate(best_pipeline.transform(line)) == pytest.approx(many, abs=0.2)
    gc.collect()  # closes the pool that pyspark does not close, with a warning


@pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool:ResourceWarning")  # pyspark's
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_two_concurrent_fits_without_a_store_are_compared_on_the_held_out_rows(line):
    mine = estimator(num_proc=3, feature_cols=["a", "b"])
    search = TrainValidationSplit(
        estimator=mine,
        estimatorParamMaps=ParamGridBuilder().addGrid(mine.epochs, [1, 40]).build(),
        evaluator=RegressionEvaluator(labelCol="y", predictionCol="y__output"),
        parallelism=2,
        seed=1,
    )
    best_pipeline = search.fit(line)
    few, many = best_pipeline.validationMetrics
    assert many < few / 2
    assert len(best_pipeline.bestModel.getHistory()) == 40
    gc.collect()  # closes the pool that pyspark does not close, with a warning


def test_a_run_id_within_a_pipeline_is_not_shared_by_several_fits(line):
    """Fit with a list of parameter maps, like Spark ML's tuning."""
    named = estimator(run_id="mine", store=Store.create("file:///nowhere"))
    pipeline = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="v"), named])
    grid = ParamGridBuilder().addGrid(named.epochs, [1, 2]).build()
    with pytest.raises(ParamError, match="run_id='mine' would make several fits share one run"):
        pipeline.fit(line, grid)
