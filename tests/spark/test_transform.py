"""Transformers of models that were trained elsewhere, in all kinds of queries."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from pyspark.ml import PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Row

from sparkhvd import Store, TorchEstimator, TorchModel
from sparkhvd.errors import DataError, ModelOutputError, ParamError, SchemaError
from sparkhvd.estimators.models.pyfunc import load, write_folder
from tests.spark import trainings

pytestmark = pytest.mark.spark


class Classifier(torch.nn.Module):
    """A network with two outputs: scores of three classes, and a number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.scores = torch.nn.Linear(3, 3)
        self.number = torch.nn.Linear(3, 1)
        self.drop = torch.nn.Dropout(0.9)

    def forward(self, x):
        return self.drop(self.scores(x)), self.number(x)


def probabilities(model, x):
    """Return the probabilities of the first output, and a struct with the best class and its probability."""
    scores = model(x)[0].softmax(dim=1)
    return scores, {"best": scores.argmax(dim=1), "sure": scores.max(dim=1).values}


@pytest.fixture(scope="module")
def rows(spark, tmp_path_factory):
    """Return rows from a file, so that a plan shows which columns Spark reads."""
    folder = str(tmp_path_factory.mktemp("rows") / "parquet")
    columns = "id", "array(id / 8.0D, id % 3 - 1.0D, 0.5D) AS v", "id % 3 AS kind", "'text' AS unused"
    spark.range(24).selectExpr(*columns).coalesce(1).write.parquet(folder)
    return spark.read.parquet(folder)


@pytest.fixture(scope="module")
def native():
    return Classifier()


@pytest.fixture(scope="module")
def model(native, rows):
    return TorchModel.from_model(native, rows, feature_cols=["v"], output_cols=["scores", "number"])


def test_a_wrapped_model_equals_the_native_one_bit_for_bit_at_equal_batches(model, native, rows):
    assert native.training, "the given model must not change"
    predictions = model.copy().setInferenceBatchSize(7).transform(rows)
    assert isinstance(predictions.schema["scores"].dataType, VectorUDT)
    assert predictions.schema["number"].dataType.simpleString() == "double"
    predictions = predictions.orderBy("id").collect()
    features = torch.tensor([row.v for row in predictions], dtype=torch.float32)
    with torch.no_grad():
        wanted = [native.eval()(features[start : start + 7]) for start in range(0, 24, 7)]
        native.train()
    assert np.array_equal(
        np.stack([row.scores.toArray() for row in predictions]), torch.cat([w[0] for w in wanted]).numpy()
    )
    assert [row.number for row in predictions] == torch.cat([w[1] for w in wanted])[:, 0].tolist()
    assert model.getHistory() == []
    with pytest.raises(ParamError, match="The model was saved without an optimizer: from_model keeps none"):
        model.getOptimizer()


def test_outputs_have_the_requested_types(model, native, rows):
    labelled = TorchModel.from_model(native, rows, feature_cols=["v"], label_cols=["kind", "id"])
    typed = labelled.copy().setOutputTypes(["label", "scalar"]).transform(rows)
    assert typed.dtypes[-2:] == [("kind__output", "bigint"), ("id__output", "double")]
    both = model.copy().setOutputTypes(["struct<a:float,b:float,c:double>", "array"]).transform(rows)
    assert both.dtypes[-2:] == [("scores", "struct<a:float,b:float,c:double>"), ("number", "array<float>")]
    scores = np.stack([row.scores.toArray() for row in model.transform(rows).orderBy("id").collect()])
    assert [row.kind__output for row in typed.orderBy("id").collect()] == scores.argmax(axis=1).tolist()
    assert [list(row.scores) for row in both.orderBy("id").collect()] == scores.tolist()


def outputs_by_hand(framework, native, table, size):
    """Return the framework's own predictions for batches of this size."""
    pieces = [table[start : start + size] for start in range(0, len(table), size)]
    if framework == "keras":
        return np.concatenate([native.predict_on_batch(piece) for piece in pieces])[:, 0]
    with torch.no_grad():
        return torch.cat([native.eval()(torch.from_numpy(piece)) for piece in pieces]).numpy()[:, 0]


@pytest.mark.parametrize("framework", ["torch", pytest.param("lightning", marks=pytest.mark.soak), "keras"])
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*")  # within Lightning 2.6 with torch 2.13
def test_every_framework_predicts_bitwise_equally_at_equal_batches_and_nearly_equally_at_others(
    spark, tmp_path, framework
):
    spark.range(40).selectExpr(*trainings.ROWS).coalesce(1).write.parquet(str(tmp_path / "rows"))
    rows = spark.read.parquet(str(tmp_path / "rows"))
    made = trainings.estimator(framework, Store.create(str(tmp_path / "store")))
    native = made.getModel()
    model = made.model_class.from_model(native, rows, feature_cols=["a", "b"], label_cols=["y"])
    table = np.array([[row.a, row.b] for row in rows.collect()], np.float32)
    wanted = outputs_by_hand(framework, native, table, 7)
    predictions = {
        size: np.array([row.y__output for row in model.setInferenceBatchSize(size).transform(rows).collect()])
        for size in (7, 40)
    }
    assert np.array_equal(predictions[7], wanted)
    assert np.abs(predictions[40] - wanted).max() <= 1e-6 * np.abs(wanted).max()
    assert len(set(wanted)) == 40


@pytest.mark.parametrize(
    "types",
    [
        None,
        ["label", "label"],
        ["array", "array<float>"],
        ["vector", "string"],
        ["struct<a:float,b:int,c:double>", "struct<one:bigint>"],
    ],
    ids=str,
)
def test_the_folder_without_spark_predicts_like_transform(native, rows, tmp_path, types):
    model = TorchModel.from_model(native, rows, feature_cols=["v"], label_cols=["kind", "id"])
    model.setInferenceBatchSize(7).setOutputTypes(types)
    write_folder(model, tmp_path)
    table = load(tmp_path).predict(rows.orderBy("id").toPandas())
    predictions = model.transform(rows).orderBy("id").collect()
    for name in model.output_names:
        if isinstance(predictions[0][name], Row):
            wanted = {
                f"{name}.{field}": [row[name][field] for row in predictions] for field in predictions[0][name].asDict()
            }
        else:
            wanted = {
                name: [row[name].toArray() if hasattr(row[name], "toArray") else row[name] for row in predictions]
            }
        for title, values in wanted.items():
            assert np.array_equal(np.stack(table[title]), np.array(values)), title


def test_a_prediction_function_replaces_the_models_call_and_is_saved(model, rows, tmp_path):
    more = model.copy().setPredictionFn(probabilities)
    more.setOutputCols(["p", "q"]).setOutputTypes(["vector", "struct<best int, sure float>"])
    PipelineModel([more]).save(str(tmp_path / "saved"))
    loaded = PipelineModel.load(str(tmp_path / "saved"))
    for predicted in (more.transform(rows), loaded.transform(rows)):
        for row in predicted.collect():
            assert row.p.toArray().sum() == pytest.approx(1, rel=1e-6)
            assert (row.q.best, row.q.sure) == (row.p.toArray().argmax(), pytest.approx(row.p.toArray().max()))
    wrong = more.copy().setOutputTypes(["vector", "array<float>"])
    with pytest.raises(
        Exception, match=r"type 'array<float>', but prediction_fn returned the fields \['best', 'sure'\]"
    ):
        wrong.transform(rows).collect()


def test_a_model_that_squeezes_its_outputs_predicts_batches_of_one_row(spark):
    class Squeezing(torch.nn.Module):
        def forward(self, x):
            return (2 * x).squeeze(), torch.cat([x, -x], dim=1).squeeze()

    df = spark.range(3).coalesce(1).selectExpr("double(id) AS x")
    for sample in (df, df.limit(1)):  # a single row does not show which dimension is the rows
        model = TorchModel.from_model(Squeezing(), sample, feature_cols=["x"], output_cols=["a", "b"])
        found = model.setInferenceBatchSize(2).transform(df).collect()
        assert [(row.a, row.b.toArray().tolist()) for row in found] == [(2 * i, [i, -i]) for i in range(3)]


def test_spark_reads_only_the_columns_that_are_used_and_predicts_once(spark, model, rows):
    """The plan prunes unused columns, and the model if no output is used."""

    def plan(df):
        return df._jdf.queryExecution().executedPlan().toString()

    used = plan(model.transform(rows).select("scores", "number"))
    assert re.findall(r"ReadSchema: (\S+)", used) == ["struct<v:array<double>>"]
    assert used.count("ArrowEvalPython") == 1, "two outputs must not make two predictions"
    assert used.count("[predict(") == 1
    without = plan(model.transform(rows).select("id"))
    assert "ArrowEvalPython" not in without
    assert re.findall(r"ReadSchema: (\S+)", without) == ["struct<id:bigint>"]


def test_output_columns_of_every_type_are_ordered_beside_columns_of_any_name(spark):
    """Columns of one type are sent as one array, under a name that the DataFrame does not use."""
    columns = {
        "f1": "cast(id / 8 AS float)",
        "i1": "cast(id AS int)",
        "dec": "cast(id * 2 AS decimal(10, 0))",
        "s": "struct(id / 16.0D AS inner)",
        "b1": "id % 2 = 0",
        "f2": "cast(if(id % 3 = 0, NULL, id / 4) AS float)",
        "a": "array(id + 1.0D, id + 2.0D)",
        "i2": "cast(id + 3 AS int)",
        "b2": "id % 3 = 0",
        "sparkhvd_features_0": "'taken'",
    }
    df = spark.range(20).selectExpr("id", *(f"{value} AS {name}" for name, value in columns.items()))
    names = ["f1", "i1", "dec", "s", "b1", "f2", "a", "i2", "b2"]
    model = TorchModel.from_model(torch.nn.Linear(10, 1), df, feature_cols=names, fill={"f2": -1.0})
    model = model.setPredictionFn(lambda _, x: x).setOutputTypes(["array<float>"]).setInferenceBatchSize(6)
    found = model.transform(df.select("*", "id"))
    assert found.columns == ["id", *columns, "id", "prediction"]
    for *given, prediction in found.select(df["id"], *df.columns[1:-1], "prediction").collect():
        row, f1, i1, dec, s, b1, f2, a, i2, b2 = given
        assert (f2 is None) == (row % 3 == 0)
        wanted = [f1, i1, dec, s.inner, b1, -1.0 if f2 is None else f2, *a, i2, b2]
        assert prediction == [float(value) for value in wanted]
    with pytest.raises(Exception, match=r"Feature column 'f2' holds NULL in \d+ of \d+ rows"):
        TorchModel.from_model(torch.nn.Linear(10, 1), df.where("id IN (1, 2)"), feature_cols=names).transform(
            df
        ).collect()


class Weighted(torch.nn.Module):
    """A model whose output depends differently on each input."""

    def forward(self, x):
        return x @ torch.tensor([[1.0], [10.0], [100.0]])


def test_struct_fields_are_matched_by_name_in_transform_saved_models_and_tables(spark, tmp_path):
    df = spark.range(6).selectExpr("struct(id + 1.0D AS b, id + 2.0D AS a) AS s", "id * 1.0D AS c")
    turned = df.selectExpr("struct(s.a, 'text' AS more, s.b) AS s", "c")
    model = TorchModel.from_model(Weighted(), df, feature_cols=["s", "c"])
    model.write().save(str(tmp_path / "saved"))
    loaded = TorchModel.load(str(tmp_path / "saved"))
    wanted = [row.s.b + 10 * row.s.a + 100 * row.c for row in df.collect()]
    assert wanted[0] == 21.0
    for each, rows in [(model, df), (model, turned), (loaded, turned)]:
        assert [row.prediction for row in each.transform(rows).collect()] == wanted
    renamed = loaded.setFeatureColumns(["t", "d"])
    assert [row.prediction for row in renamed.transform(turned.toDF("t", "d")).collect()] == wanted
    with pytest.raises(SchemaError, match=r"'t' has no field 'b', which the model was trained on \(s\.b\)"):
        renamed.transform(df.selectExpr("struct(s.a, s.a AS z) AS t", "c AS d"))
    (tmp_path / "folder").mkdir()
    write_folder(model, tmp_path / "folder")
    opened = load(tmp_path / "folder")
    for table in (turned.toPandas(), df.selectExpr("s.a AS `s.a`", "s.b AS `s.b`", "c").toPandas()):
        assert opened.predict(table).prediction.tolist() == wanted
    with pytest.raises(SchemaError, match=r"Column 's' has no field 'b'; it has \['a'\]"):
        opened.predict(df.selectExpr("struct(s.a) AS s", "c").toPandas())


VECTOR_USES = {
    "collect": lambda df: [row.prediction for row in df.collect()],
    "select": lambda df: [row.prediction for row in df.select("prediction").collect()],
    "filter": lambda df: [row.prediction for row in df.where("prediction > 0.5 AND v IS NOT NULL").collect()],
    "count": lambda df: df.where("prediction IS NOT NULL").count(),
    "agg": lambda df: df.agg({"prediction": "sum"}).first()[0],
}


def test_parquet_rows_with_vectors_are_predicted_in_any_query(spark, tmp_path):
    """Spark 4.3 fails on columnar batches if a Python function receives a vector, or if the rows have one."""
    assembler = VectorAssembler(inputCols=["a", "b", "c", "d"], outputCol="v")
    columns = "id", "id % 3 / 4.0D AS a", "id % 2 / 2.0D AS b", "0.0D AS c", "0.0D AS d"
    table = assembler.transform(spark.range(8).selectExpr(*columns))
    assert {type(row.v).__name__ for row in table.collect()} == {"DenseVector", "SparseVector"}
    table.selectExpr("*", "array(v) AS nested", "struct(v) AS s").coalesce(1).write.parquet(str(tmp_path / "rows"))
    rows = spark.read.parquet(str(tmp_path / "rows"))
    wanted = [row.a + 10 * row.b for row in rows.collect()]

    class Weights(torch.nn.Module):
        def forward(self, x):
            return x @ torch.tensor([[1.0], [10.0], [0.0], [0.0]])

    for features, given in [(["v"], rows), (["s"], rows.drop("v")), (["a", "b", "c", "d"], rows)]:
        model = TorchModel.from_model(Weights(), given, feature_cols=features)
        predicted = model.transform(given if "v" in given.columns else given.withColumn("v", given.nested[0]))
        found = {name: use(predicted) for name, use in VECTOR_USES.items()}
        positive = [value for value in wanted if value > 0.5]
        assert found == {"collect": wanted, "select": wanted, "filter": positive, "count": 8, "agg": sum(wanted)}
    model = PipelineModel([assembler, model])
    model.transform(rows.drop("v")).where("prediction > 0.5").write.parquet(str(tmp_path / "predicted"))
    assert spark.read.parquet(str(tmp_path / "predicted")).count() == len(positive)
    stream = spark.readStream.schema(rows.schema).parquet(str(tmp_path / "rows"))
    streamed = model.stages[1].transform(stream).where("prediction > 0.5").writeStream.format("memory").queryName("vs")
    query = streamed.option("checkpointLocation", str(tmp_path / "check")).trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(60), "the stream must end"
        assert [row.prediction for row in spark.table("vs").collect()] == positive
    finally:
        query.stop()
        spark.catalog.dropTempView("vs")


def test_outputs_work_in_sql_and_structured_streaming(spark, model, rows, tmp_path):
    model.transform(rows).createOrReplaceTempView("predictions")
    best = spark.sql("SELECT kind, max(number) AS most FROM predictions WHERE id < 12 GROUP BY kind ORDER BY kind")
    wanted = {row.id: row.number for row in model.transform(rows).collect()}
    assert [row.most for row in best.collect()] == [max(wanted[i] for i in range(k, 12, 3)) for k in range(3)]
    spark.catalog.dropTempView("predictions")
    stream = spark.readStream.schema(rows.schema).parquet(rows.inputFiles()[0].rpartition("/")[0])
    query = (
        model.transform(stream)
        .select("id", "number")
        .writeStream.format("memory")
        .queryName("streamed")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(60), "the stream must end"
        assert {row.id: row.number for row in spark.table("streamed").collect()} == wanted
    finally:
        query.stop()
        spark.catalog.dropTempView("streamed")


def test_models_of_numbers_are_wrapped_from_a_schema_and_kept_in_a_store(spark, tmp_path):
    store = Store.create(str(tmp_path))
    schema = spark.range(1).selectExpr("id AS a", "id AS b").schema
    sums = TorchModel.from_model(torch.nn.Linear(2, 1), schema, feature_cols=["a", "b"], store=store)
    assert sums.getOutputCols() == ["prediction"]
    assert [path.rpartition("/")[2] for path in store.list("runs")] == ["inputs.json", "module.pkl", "state_dict.pt"]
    assert sums.transform(spark.range(3).selectExpr("id AS a", "id AS b")).dtypes[-1] == ("prediction", "double")


def test_invalid_models_are_refused_before_any_transform(spark, native, model, rows):
    with pytest.raises(SchemaError, match="There is no column 'w'"):
        TorchModel.from_model(native, rows, feature_cols=["w"])
    with pytest.raises(ParamError, match="The length of column 'v' is unknown"):
        TorchModel.from_model(native, rows.schema, feature_cols=["v"])
    with pytest.raises(DataError, match="The DataFrame has no rows"):
        TorchModel.from_model(native, rows.where("id < 0"), feature_cols=["v"])
    with pytest.raises(ModelOutputError, match=r"cannot take the feature columns \(input 0 is id as rows x \[1\]"):
        TorchModel.from_model(native, rows, feature_cols=["id"])
    with pytest.raises(ParamError, match="model is a str; it must be"):
        TorchModel.from_model("native", rows, feature_cols=["v"])
    for types, message in [
        (["vector"], "output_types has 1 type .*, but the model has 2 outputs"),
        (["vector", "map<int,int>"], "an output cannot be a map"),
        (["vector", "wrong<"], "has the unknown type 'wrong<'"),
        (["int", "auto"], r"'scores' has the type 'int', one value per row, but the output has rows of shape \[3\]"),
    ]:
        with pytest.raises(ParamError, match=message):
            model.copy().setOutputTypes(types).transform(rows)
    with pytest.raises(ParamError, match=r"transform takes a Spark DataFrame, not a pandas\.DataFrame"):
        model.transform(rows.toPandas())
    with pytest.raises(ParamError, match="prediction_fn=3 must be a function"):
        model.copy().setPredictionFn(3)


def test_describe_prints_the_mapping_and_the_models_outputs_for_five_rows(rows, capsys):
    net = torch.nn.Linear(3, 3)
    estimator = TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=torch.nn.functional.cross_entropy,
        inputs={"input": {"columns": ["v"]}},
        label_cols=["kind"],
    )
    estimator.describe(rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["TorchEstimator", "  input 0 is v (float32)", "  output 0 is kind"]
    assert lines[3] == "5 rows and the model's outputs before training:"
    assert lines[4].split("  ")[1:4] == ["feature v: float64[3]", "label kind: int64", "output 0: float32[3]"]
    assert len(lines) == 10
    assert "0.125 0 0.5" in " ".join(lines), "the order of the rows is arbitrary"
    with pytest.raises(ModelOutputError, match="cannot compare the model's output"):
        estimator.copy({estimator.loss: torch.nn.functional.mse_loss}).describe(rows)


class Given(torch.nn.Module):
    """Returns its inputs unchanged, with the sum of the vector."""

    def forward(self, a, b, v):
        return torch.stack([a, b, v.sum(1)], 1)


def test_tables_with_other_types_predict_like_transform(spark, tmp_path):
    trained = spark.range(1).selectExpr("CAST(id AS TINYINT) AS a", "CAST(id AS FLOAT) AS b", "array(1, 2) AS v")
    model = TorchModel.from_model(Given().double(), trained, feature_cols=["a", "b", "v"])
    write_folder(model, tmp_path)
    opened = load(tmp_path)
    for columns in (
        ("1.75D AS a", "16777217 AS b", "array(0.1D, 0.2D) AS v"),
        ("id + 300 AS a", "true AS b", "array(2147483648, 1) AS v"),
        ("CAST(0.1 AS FLOAT) AS a", "CAST(3 AS TINYINT) AS b", "array(CAST(0.1 AS FLOAT), CAST(1 AS FLOAT)) AS v"),
    ):
        rows = spark.range(3).selectExpr("id", *columns)
        wanted = [row.prediction.toArray().tolist() for row in model.transform(rows).orderBy("id").collect()]
        assert [row.tolist() for row in opened.predict(rows.orderBy("id").toPandas())["prediction"]] == wanted


@pytest.mark.parametrize("stored", [True, False])
def test_fit_and_transform_find_columns_in_any_case_like_spark(spark, tmp_path, stored):
    rows = spark.range(12).selectExpr(
        "id / 8.0D AS x", "named_struct('a', id / 4.0D) AS s", "id * 1.0D AS y", "id = 3 AS held"
    )
    torch.manual_seed(1)
    network = torch.nn.Linear(2, 1)
    estimator = TorchEstimator(
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), 0.01),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["X", "S"],
        label_cols=["Y"],
        validation="HELD",
        num_proc=1,
        epochs=1,
        batch_size=4,
        verbose=0,
        store=Store.create(str(tmp_path)) if stored else None,
    )
    trained = estimator.fit(rows)
    assert "Y__output" in trained.transform(rows).columns
    expected = [row["Y__output"] for row in trained.transform(rows).collect()]
    renamed = rows.selectExpr("x AS X", "s AS S", "y")
    assert [row["Y__output"] for row in trained.transform(renamed).collect()] == expected
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        with pytest.raises(SchemaError, match="There is no column 'X'"):
            trained.transform(rows)
        with pytest.raises(SchemaError, match="There is no column 'HELD'"):
            estimator.fit(rows)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
