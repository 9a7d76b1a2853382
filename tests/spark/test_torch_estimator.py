from __future__ import annotations

import math
import re
import uuid
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from pyspark import SparkFiles
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions
from pyspark.sql.types import BooleanType, DoubleType, FloatType, IntegerType, StructField, StructType
from torch.nn import functional

from sparkhvd import Checkpoints, Store, TorchEstimator
from sparkhvd.errors import DataError, ModelOutputError, ParamError, SchemaError, SlotsError
from sparkhvd.estimators.api import estimator as estimator_api
from sparkhvd.estimators.models import predict
from sparkhvd.store import layout

pytestmark = pytest.mark.spark

VECTOR = StructType([StructField("v", VectorUDT())])
XOR = StructType(
    [
        StructField("id", IntegerType()),
        StructField("a", DoubleType()),
        StructField("b", DoubleType()),
        StructField("y", IntegerType()),
        StructField("held_out", BooleanType()),
        *VECTOR,
    ]
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store.create(str(tmp_path_factory.mktemp("a store")))


@pytest.fixture(scope="module")
def xor(spark):
    """Return a noisy exclusive or: the label is 1 if exactly one column is near 1. Every fifth row is held out."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 2, (400, 2))
    noisy = bits + 0.1 * random.normal(size=bits.shape)
    rows = [
        (int(i), float(a), float(b), int(x ^ y), bool(i % 5 == 0), Vectors.dense([a, b]))
        for i, ((a, b), (x, y)) in enumerate(zip(noisy, bits, strict=True))
    ]
    df = spark.createDataFrame(rows, XOR).repartition(3)
    df = df.cache()
    df.count()
    yield df
    df.unpersist()


def network(inputs=2, outputs=2):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(inputs, 16), torch.nn.Tanh(), torch.nn.Linear(16, outputs))


def accuracy(output, label):
    return (output.argmax(dim=1) == label).float().mean()


def estimator(store, model=None, **more):
    model = network() if model is None else model
    params = {
        "num_proc": 2,
        "store": store,
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.05),
        "loss": functional.cross_entropy,
        "feature_cols": ["a", "b"],
        "label_cols": ["y"],
        "batch_size": 16,
        "epochs": 4,
        "random_seed": 3,
    }
    return TorchEstimator(**{**params, **more})


@contextmanager
def jobs_of(spark):
    """Yield a list; after the block, it contains the ids of the Spark jobs that the block started."""
    group, jobs = uuid.uuid4().hex, []
    spark.sparkContext.setJobGroup(group, "counted by a test")
    try:
        yield jobs
    finally:
        jobs.extend(spark.sparkContext.statusTracker().getJobIdsForGroup(group))
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
        spark.sparkContext.setLocalProperty("spark.job.description", None)


def parameters(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# The properties of one fit.


@pytest.fixture(scope="module")
def user_objects():
    """Provide the user's model and optimizer."""
    model = network()
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def fitted(spark, store, xor, user_objects):
    model, optimizer = user_objects
    return estimator(
        store,
        model,
        optimizer=optimizer,
        feature_cols=["v"],
        metrics=[accuracy],
        validation="held_out",
        run_id="the fit",
    ).fit(xor)


def test_a_fit_with_two_ranks_reduces_the_loss(fitted):
    history = fitted.getHistory()
    assert [entry["epoch"] for entry in history] == [0, 1, 2, 3]
    assert history[-1]["train"]["loss"] < history[0]["train"]["loss"] / 2
    assert history[-1]["train"]["all_metrics"][0]["accuracy"] > 0.95
    assert history[-1]["validation"]["all_metrics"][0]["accuracy"] > 0.95
    assert history[-1]["rows_per_second"] > 0
    assert sum(history[-1]["shares"].values()) == pytest.approx(1)


def test_the_history_is_measured_on_the_right_rows(fitted, xor):
    """The last validation loss is the loss of the returned model over the held-out rows, each counted once."""
    rows = xor.where("held_out").select("a", "b", "y").toPandas()
    with torch.no_grad():
        output = fitted.getModel()(torch.tensor(rows[["a", "b"]].to_numpy(), dtype=torch.float32))
    expected = functional.cross_entropy(output, torch.tensor(rows["y"].to_numpy(), dtype=torch.int64)).item()
    assert fitted.getHistory()[-1]["validation"]["loss"] == pytest.approx(expected, rel=1e-4)


def test_the_users_model_and_optimizer_are_not_changed(fitted, user_objects):
    model, optimizer = user_objects
    assert torch.equal(parameters(model), parameters(network()))
    assert model.training
    assert type(optimizer) is torch.optim.Adam
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_model_and_its_optimizer_are_returned_trained(fitted):
    model, optimizer = fitted.getModelAndOptimizer()
    assert not model.training
    assert torch.equal(parameters(model), parameters(fitted.getModel()))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert int(optimizer.state[model[0].weight]["step"]) == 4 * 10  # 320 rows in steps of 2 x 16


def test_transform_equals_the_models_predictions(fitted, xor):
    predicted = fitted.transform(xor)
    assert predicted.columns == [*xor.columns, "y__output"]
    assert isinstance(predicted.schema["y__output"].dataType, VectorUDT)
    assert predicted.schema.fields[:-1] == xor.schema.fields
    rows = predicted.orderBy("id").collect()
    features = np.array([row.v.toArray() for row in rows])
    with torch.no_grad():
        expected = fitted.getModel()(torch.tensor(features, dtype=torch.float32)).numpy()
    predictions = np.array([row.y__output.toArray() for row in rows])
    np.testing.assert_allclose(predictions, expected, rtol=1e-5, atol=1e-5)
    assert (predictions.argmax(axis=1) == np.array([row.y for row in rows])).mean() > 0.95


def test_transform_starts_no_job_and_keeps_the_partitions(spark, fitted, xor):
    with jobs_of(spark) as jobs:
        predicted = fitted.transform(xor.repartition(5))
    assert jobs == []
    assert predicted.rdd.getNumPartitions() == 5
    with jobs_of(spark) as jobs:
        predicted.count()
    assert jobs, "jobs were not counted"


def test_executors_fetch_models_into_a_folder_that_spark_removes(spark):
    in_task = spark.sparkContext.parallelize([0], 1).map(lambda _: predict._application_folder()).first()
    assert in_task == SparkFiles.getRootDirectory()
    assert predict._application_folder() is None


def test_transform_works_on_an_empty_dataframe(fitted, xor):
    predicted = fitted.transform(xor.where("id < 0"))
    assert predicted.collect() == []
    assert predicted.columns[-1] == "y__output"


def test_transform_works_with_evaluators_and_sql(spark, fitted, xor):
    scores = fitted.transform(xor.select("v", functions.col("y").cast("double").alias("y")))
    best = functions.udf(lambda vector: float(np.argmax(vector.toArray())), "double")
    evaluator = MulticlassClassificationEvaluator(labelCol="y", predictionCol="best", metricName="accuracy")
    assert evaluator.evaluate(scores.withColumn("best", best("y__output"))) > 0.95
    scores.createOrReplaceTempView("scores")
    assert spark.sql("SELECT count(y__output) AS n FROM scores WHERE y = 1").first().n == xor.where("y = 1").count()
    spark.catalog.dropTempView("scores")


def test_predictions_do_not_depend_on_the_batch_size(fitted, xor):
    few = xor.orderBy("id").limit(20)
    at_once = fitted.transform(few).collect()
    in_threes = fitted.copy().setInferenceBatchSize(3).transform(few).collect()
    for one, other in zip(at_once, in_threes, strict=True):
        np.testing.assert_allclose(one.y__output.toArray(), other.y__output.toArray(), rtol=1e-5, atol=1e-6)


def test_output_and_feature_columns_can_be_renamed(fitted, xor):
    renamed = xor.select(functions.col("v").alias("my.features"))
    model = fitted.copy().setOutputCols(["scores"]).setFeatureColumns(["my.features"])
    assert model.getOutputCols() == ["scores"]
    assert model.transform(renamed).columns == ["my.features", "scores"]
    assert len(model.transform(renamed).limit(3).collect()) == 3
    assert fitted.getOutputCols() == ["y__output"]


def test_the_model_knows_its_columns_and_its_run(fitted):
    assert tuple(fitted.getFeatureColumns()) == ("v",)
    assert tuple(fitted.getLabelColumns()) == ("y",)
    assert fitted.getRunId() == "the fit"


def test_transform_refuses_columns_that_do_not_fit(fitted, xor):
    with pytest.raises(SchemaError, match=r"There is no column 'v' \(requested as feature\)"):
        fitted.transform(xor.drop("v"))
    with pytest.raises(SchemaError, match="already has a column 'y__output'"):
        fitted.transform(fitted.transform(xor))
    with pytest.raises(SchemaError, match="Feature column 'a' is a number; the model was trained on a vector"):
        fitted.copy().setFeatureColumns(["a"]).transform(xor)
    with pytest.raises(ParamError, match=r"output_cols names 2 columns .* for 1 output \(label columns"):
        fitted.copy().setOutputCols(["one", "two"]).transform(xor)


def test_errors_for_null_and_wrong_lengths_name_the_column(spark, fitted):
    with_null = spark.createDataFrame([(Vectors.dense([1.0, 0.0]),), (None,)], VECTOR).coalesce(1)
    with pytest.raises(Exception, match="Feature column 'v' holds NULL in 1 of 2 rows"):
        fitted.transform(with_null).collect()
    longer = spark.createDataFrame([(Vectors.dense([1.0, 0.0, 2.0]),)], VECTOR)
    with pytest.raises(Exception, match="Feature column 'v' has rows of length 3; the model was trained with"):
        fitted.transform(longer).collect()


def test_a_run_keeps_its_last_checkpoint_and_its_model_in_the_store(fitted, store):
    assert [*map(layout.checkpoint_position, store.list(layout.checkpoints_folder("the fit")))] == [(3, math.inf)]
    files = {path.rpartition("/")[2] for path in store.list(layout.model_folder("the fit"))}
    assert files == {"inputs.json", "module.pkl", "optimizer.pkl", "state_dict.pt"}


# Other fits.


def test_a_run_resumes_with_its_seed(store, xor, capfd):
    """Two epochs, and two more with the same run_id, equal four epochs bit by bit; progress reaches the terminal."""
    half = estimator(store, epochs=2, run_id="continued")
    half.fit(xor)
    whole = estimator(store, epochs=4, run_id="continued", random_seed=None, metrics={"right": accuracy}).fit(xor)
    uninterrupted = estimator(store, epochs=4).fit(xor)
    assert torch.equal(parameters(whole.getModel()), parameters(uninterrupted.getModel()))
    assert [entry["epoch"] for entry in whole.getHistory()] == [0, 1, 2, 3]
    shown = capfd.readouterr().out
    assert shown.count("<stdout>:run continued starts; a later fit with this run_id resumes it") == 1
    assert "[0]<stdout>:run continued resumes after epoch 2" in shown
    assert re.search(r"^\[0\]<stdout>:run torch-\S+ starts", shown, re.MULTILINE), (
        "no start of a run with a generated name"
    )
    line = (
        r"\[0\]<stdout>:epoch 4/4  loss \S+  right \S+  [\d,]+ rows/s  step \S+ ms = data \d+% \+ compute \d+% \+ comm"
    )
    assert re.search(line, shown)
    assert "[1]<stdout>:epoch" not in shown


def test_two_dataframes_in_one_store_never_see_each_others_rows(spark, store, xor):
    """The second DataFrame has the opposite labels, and a pipeline fits it with the same store."""
    opposite = xor.drop("v").withColumn("y", 1 - functions.col("y"))
    first = estimator(store, validation=0.25, epochs=6).fit(xor)
    assembled = Pipeline(
        stages=[
            VectorAssembler(inputCols=["a", "b"], outputCol="both"),
            estimator(store, feature_cols=["both"], validation=0.25, epochs=6),
        ]
    ).fit(opposite)
    second = assembled.stages[-1]
    assert first.getRunId() != second.getRunId()
    corners = torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]])
    assert first.getModel()(corners).argmax(dim=1).tolist() == [0, 1, 1, 0]
    assert second.getModel()(corners).argmax(dim=1).tolist() == [1, 0, 0, 1]
    assert "y__output" in assembled.transform(opposite).columns
    assert 0 < first.getHistory()[-1]["validation"]["loss"] < 1


class TwoTowers(torch.nn.Module):
    """A network with two outputs and two inputs, one of them a category number."""

    def __init__(self):
        super().__init__()
        self.kinds = torch.nn.Embedding(4, 3)
        self.value = torch.nn.Linear(6, 1)
        self.size = torch.nn.Linear(6, 2)

    def forward(self, kind, measured):
        both = torch.cat([self.kinds(kind), measured], dim=1)
        return self.value(both), self.size(both)


def test_several_inputs_and_outputs_keep_their_names_and_types(spark, store):
    df = spark.range(40).selectExpr(
        "cast(id % 4 as int) as kind",
        "array(cast(id as float), 0.5f, cast(id % 3 as float)) as measured",
        "cast(id as float) as value",
        "array(id % 2, id % 3) as `size.of`",
    )
    model = TwoTowers()
    trained = TorchEstimator(
        num_proc=1,
        store=store,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loss=[functional.mse_loss, functional.l1_loss],
        loss_weights=[0.25, 2.0],
        metrics=[[functional.l1_loss], [functional.mse_loss, functional.l1_loss]],
        feature_cols=["kind", "measured"],
        label_cols=["value", "size.of"],
        shuffle=False,
        random_seed=1,
        train_steps_per_epoch=1,
        batch_size=40,
        verbose=0,
    ).fit(df)
    predicted = trained.transform(df)
    assert isinstance(predicted.schema["value__output"].dataType, FloatType)
    assert isinstance(predicted.schema["size.of__output"].dataType, VectorUDT)
    rows = predicted.collect()
    kind = torch.tensor([row.kind for row in rows])
    value, size = model(kind, torch.tensor([row.measured for row in rows]))
    np.testing.assert_allclose([row.value__output for row in rows], value[:, 0].detach(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose([row["size.of__output"] for row in rows], size.detach(), rtol=1e-5, atol=1e-5)
    sizes = torch.tensor([row["size.of"] for row in rows]).float()
    values = torch.tensor([[row.value] for row in rows])
    expected = 0.25 * functional.mse_loss(value, values) + 2 * functional.l1_loss(size, sizes)
    (entry,) = trained.getHistory()
    assert entry["train"]["loss"] == pytest.approx(expected.item(), rel=1e-4)
    names = [name for metric in entry["train"]["all_metrics"] for name in metric]
    assert names == ["group_0_value", "group_0_size.of", "group_1_value", "group_1_size.of"]
    assert entry["validation"] == {}


def test_one_number_for_an_integer_label_is_a_double(spark, store, xor):
    trained = estimator(
        store, network(outputs=1), loss=torch.nn.BCEWithLogitsLoss(), num_proc=1, epochs=1, verbose=0
    ).fit(xor, {})
    assert isinstance(trained.transform(xor).schema["y__output"].dataType, DoubleType)


# Errors before any training, and before any Spark job where the schema suffices.


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"feature_cols": ["a", "bb"]}, SchemaError, r"There is no column 'bb' \(requested as feature\)"),
        ({"label_cols": ["why"]}, SchemaError, r"There is no column 'why' \(requested as label\)"),
        (
            {"feature_cols": ["a", "text"]},
            SchemaError,
            "Column 'text' has the type string, which cannot be a feature of a model",
        ),
        ({"validation": "holdout"}, SchemaError, r"There is no column 'holdout' \(requested as validation\)"),
        (
            {"store": None, "data": "store"},
            ParamError,
            r"data='store' sends the rows through a Store, but the estimator has no Store",
        ),
        (
            {"store": None, "run_id": "mine"},
            ParamError,
            r"run_id='mine' names a run .* but the estimator has no Store, so only the trained model is kept",
        ),
        ({"model": None}, ParamError, r"TorchEstimator needs model: pass the model"),
        ({"loss": None}, ParamError, r"TorchEstimator needs a loss; set loss or loss_constructors"),
        ({"feature_cols": None}, ParamError, "TorchEstimator needs feature_cols: pass the names"),
        ({"num_proc": 9}, SlotsError, "num_proc=9 is more than the 4 slots of the cluster"),
        ({"loss_weights": [1.0, 2.0]}, ParamError, "loss_weights has 2 entries, but label_cols has 1"),
        (
            {"feature_cols": ["a"]},
            ModelOutputError,
            r"cannot take the feature columns \(a: float64\[\]\)\. It was called with input 0 of shape \[2, 1\]",
        ),
        (
            {"loss": functional.mse_loss},
            ModelOutputError,
            r"The loss mse_loss cannot compare the model's output of shape \[2, 2\] with label 'y' of shape \[2\]",
        ),
    ],
)
def test_errors_visible_in_the_schema_are_raised_before_any_job(spark, store, xor, more, error, message):  # noqa: PLR0917
    df = xor.withColumn("text", functions.lit("x"))
    wrong = estimator(store)
    for name, value in more.items():
        wrong._set(**{name: value})
    before = store.list("")
    with jobs_of(spark) as jobs, pytest.raises(error, match=message):
        wrong.fit(df)
    assert jobs == []
    assert store.list("") == before


ARRAYS = "x array<double>, y int"


@pytest.mark.parametrize(
    ("rows", "more", "error", "message"),
    [
        ([([1.0, 2.0], 0), (None, 1)], {}, DataError, r"Column 'x' \(feature\) has 1 NULL value"),
        ([([1.0, None], 0), ([1.0, 2.0], 1)], {}, DataError, r"Column 'x' \(feature\) has 1 NULL value inside"),
        ([([1.0], 0), ([1.0, 2.0], 1)], {}, SchemaError, r"Column 'x' \(feature\) has rows of length 1 and 2"),
        ([], {}, DataError, "The DataFrame has no rows to train on"),
        ([([1.0, 2.0], 0)], {}, DataError, "There is 1 row to train on but num_proc is 2"),
        (
            [([1.0, 2.0, 3.0], 0)] * 4,
            {},
            ModelOutputError,
            r"feature columns \(x: float64\[3\]\)\. It was called with input 0 of shape \[2, 3\] from x",
        ),
        (
            [([1.0, 2.0], 0)] * 4,
            {"loss": functional.mse_loss},
            ModelOutputError,
            r"output of shape \[2, 2\] with label 'y' of shape \[2\]",
        ),
    ],
    ids=["null", "null inside", "ragged", "no rows", "fewer rows than ranks", "input shape", "output shape"],
)
def test_errors_visible_in_the_rows_are_raised_before_training(spark, store, rows, more, error, message):  # noqa: PLR0917
    runs = [path for path in store.list("") if path.startswith("runs/")]
    df = spark.createDataFrame(rows, ARRAYS)
    with pytest.raises(error, match=message):
        estimator(store, feature_cols=["x"], **more).fit(df)
    assert [path for path in store.list("") if path.startswith("runs/")] == runs


def test_an_epoch_has_the_requested_steps_even_from_a_cache(store, xor):
    model = network()
    adam = torch.optim.Adam(model.parameters())
    params = {"train_steps_per_epoch": 3, "validation_steps_per_epoch": 1, "val_batch_size": 5, "local_cache": True}
    trained = estimator(store, model, optimizer=adam, num_proc=1, validation=0.2, epochs=2, **params).fit(xor)
    after, optimizer = trained.getModelAndOptimizer()
    assert int(optimizer.state[next(after.parameters())]["step"]) == 2 * 3
    assert len(trained.getHistory()) == 2


def test_an_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match="TorchEstimator has no parameter 'learning_rate'"):
        TorchEstimator(learning_rate=1.0)


def test_the_preparation_follows_the_parameters(xor, tmp_path, monkeypatch):
    class AcquireCalledError(Exception):
        pass

    def acquire(dataset, selection, store, writing, *, keep_seconds):
        raise AcquireCalledError(writing.compress, writing.partitions_per_process, writing.num_proc, keep_seconds)

    monkeypatch.setattr(estimator_api, "acquire", acquire)
    params = {"compress_sparse_cols": True, "partitions_per_process": 3, "keep_data": 0.5}
    with pytest.raises(AcquireCalledError) as caught:
        estimator(Store.create(str(tmp_path)), **params).fit(xor)
    assert caught.value.args == (True, 3, 2, 1800.0)


@pytest.mark.parametrize("with_store", [False, True])
def test_the_best_model_with_batch_normalization_has_the_recorded_validation_loss(store, xor, with_store):
    """The running statistics of the best model are also those of the best epoch."""
    torch.manual_seed(1)
    norm = torch.nn.BatchNorm1d(16, momentum=0.5)
    model = torch.nn.Sequential(torch.nn.Linear(2, 16), norm, torch.nn.Tanh(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    growing = torch.optim.lr_scheduler.ExponentialLR(optimizer, 20.0)  # until the loss rises
    keeping_best = estimator(
        store if with_store else None,
        model,
        optimizer=optimizer,
        lr_scheduler=growing,
        epochs=5,
        validation="held_out",
        checkpoints=Checkpoints(best="val_loss"),
    )
    trained = keeping_best.fit(xor)
    losses = [record["validation"]["loss"] for record in trained.getHistory()]
    assert min(losses) < losses[-1], "the last epoch is not the best"
    held_out = xor.where("held_out").toPandas()
    with torch.no_grad():
        output = trained.getModel().eval()(torch.from_numpy(held_out[["a", "b"]].to_numpy()).float())
        loss = functional.cross_entropy(output, torch.from_numpy(held_out["y"].to_numpy()).long())
    assert loss.item() == pytest.approx(min(losses), rel=1e-5)
