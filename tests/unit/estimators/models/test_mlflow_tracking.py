"""The metrics and parameters that MLflow logs, and the model that it opens without Spark."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path

import keras
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyspark.ml.linalg import DenseVector, SparseVector

import sparkhvd
from sparkhvd.data.schema import columns
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.errors import DataError, SchemaError
from sparkhvd.estimators.keras import KerasModel
from sparkhvd.estimators.keras.plugin import PLUGIN as KERAS
from sparkhvd.estimators.models import mlflow_tracking, pyfunc
from sparkhvd.estimators.models.mlflow_tracking import SearchPart, requirements, track
from sparkhvd.estimators.models.outputs import OutputColumn, OutputSpec
from sparkhvd.estimators.models.pandas_columns import feature_array
from sparkhvd.estimators.models.trained import ModelArtifacts
from sparkhvd.estimators.params.policies import Checkpoints
from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.torch import TorchEstimator, TorchModel
from sparkhvd.estimators.torch.plugin import PLUGIN
from sparkhvd.estimators.training.job_files import read_folder
from sparkhvd.estimators.training.worker import TrainResult

SCHEMA = DataSchema((ColumnSpec("v", "float64", (2,), "feature", "vector"),))
HISTORY = (EpochRecord(0, {"loss": 2.0}, {"loss": 2.5}), EpochRecord(1, {"loss": 1.0}, {"loss": 1.5}))
TABLE = pd.DataFrame({"w": [np.array([0.5, 0.25]), np.array([1.0, 0.0])]}, index=[7, 9])


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(4)
    return torch.nn.Linear(2, 1)


@pytest.fixture(scope="module")
def model(network, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    PLUGIN.export({"model": network}, SCHEMA, folder)
    files, kept = read_folder(folder)
    trained = ModelArtifacts(kept, files, SCHEMA, (OutputSpec((1,), "float64", vector=False),), HISTORY)
    return TorchModel(trained, feature_columns=["w"], output_cols=["found"])


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/runs")
    return pytest.importorskip("mlflow")


@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred:UserWarning")  # a warning about MLflow's own code
def test_the_active_run_gets_parameters_metrics_by_epoch_and_a_model(mlflow, model, network):
    track(model, {"batch_size": 5})  # no run is active: nothing happens
    with mlflow.start_run() as run:
        mlflow.log_metric("rows_per_second", 1.0, step=0)  # a metric of the user with the name of one of the fit's
        track(model, {"batch_size": 5, "model": network, "loss": "x" * 9000, "run_id": None})
    kept = mlflow.get_run(run.info.run_id).data
    assert {name: len(value) for name, value in kept.params.items()} == {"batch_size": 1, "model": 6, "loss": 500}
    assert kept.params["model"] == "Linear"
    losses = mlflow.MlflowClient().get_metric_history(run.info.run_id, "val_loss")
    assert {(one.step, one.value) for one in losses} == {(0, 2.5), (1, 1.5)}
    (logged,) = mlflow.search_logged_models(output_format="list")
    predicted = mlflow.pyfunc.load_model(logged.model_uri).predict(TABLE)
    assert predicted.index.tolist() == [7, 9]
    with torch.no_grad():
        wanted = network(torch.tensor(np.stack(TABLE["w"]), dtype=torch.float32))[:, 0]
    assert predicted["found"].tolist() == wanted.tolist()


@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred:UserWarning")
@pytest.mark.parametrize(("policy", "epoch"), [(Checkpoints(), 1), (Checkpoints(best="loss", mode="max"), 0)])
def test_a_logged_model_has_the_metrics_of_its_epoch(mlflow, model, policy, epoch):
    with mlflow.start_run():
        track(model, {"checkpoints": policy, "run_id": None})
    (logged,) = mlflow.search_logged_models(output_format="list")
    losses = {metric.key: metric.value for metric in logged.metrics}
    assert losses["val_loss"] == HISTORY[epoch].validation["loss"]
    assert {metric.step for metric in logged.metrics} == {epoch}


def test_the_environment_of_a_logged_model_has_its_framework():
    name, version = sparkhvd.__name__, sparkhvd.__version__
    needed = {
        kind: requirements(f"sparkhvd.estimators.{kind}.plugin:PLUGIN") for kind in ("torch", "lightning", "keras")
    }
    names = {kind: [line.partition("==")[0] for line in lines] for kind, lines in needed.items()}
    assert names["torch"] == [name, "pandas", "torch"]
    assert names["lightning"] == [name, "pandas", "torch", "lightning", "pytorch_lightning"]
    assert names["keras"] == [name, "pandas", "keras", keras.config.backend()]
    assert needed["torch"][0] == f"{name}=={version}"
    assert needed["torch"][2] == f"torch=={torch.__version__.split('+')[0]}"


@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred:UserWarning")
def test_a_training_of_an_estimator_is_logged_to_the_active_run(mlflow, model):
    estimator = TorchEstimator(feature_cols=["w"], label_cols=["y"])
    schema = DataSchema((*SCHEMA.columns, ColumnSpec("y", "float64", (), "label", "scalar")))
    result = TrainResult(HISTORY, model.trained.files, model.trained.store, schema, [(1,)])
    with mlflow.start_run() as run:
        estimator._model(estimator._plan(run_id="one"), result)
    assert mlflow.get_run(run.info.run_id).data.metrics["val_loss"] == 1.5


@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred:UserWarning")
def test_a_second_training_in_one_run_gets_a_nested_run(mlflow, model, monkeypatch):
    logged = []
    monkeypatch.setattr(mlflow_tracking, "log_model", lambda _, **_more: logged.append(mlflow.active_run().info.run_id))
    with mlflow.start_run() as outer:
        track(model, {"batch_size": 5, "run_id": "one"})
        track(model, {"batch_size": 6, "run_id": "two"})
        assert mlflow.active_run().info.run_id == outer.info.run_id
    nested = mlflow.MlflowClient().search_runs(["0"], f"tags.mlflow.parentRunId = '{outer.info.run_id}'")
    assert [run.data.params["batch_size"] for run in nested] == ["6"]
    assert nested[0].data.metrics["val_loss"] == 1.5
    assert logged == [outer.info.run_id, nested[0].info.run_id]
    assert mlflow.get_run(outer.info.run_id).data.params["batch_size"] == "5"


def test_a_fit_in_another_thread_gets_a_run_nested_in_the_callers(mlflow, model, monkeypatch):
    """Fit in a thread, like a CrossValidator, which fits copies of the estimator in threads."""
    monkeypatch.setattr(mlflow_tracking, "log_model", lambda *_, **_more: None)
    estimator = TorchEstimator()

    def in_thread(parent, name):
        thread = threading.Thread(target=track, args=(model, {"run_id": name}, parent))
        thread.start()
        thread.join(60)

    with mlflow.start_run() as outer:
        copied = estimator.copy().copy()
        for name in ("one", "two"):
            in_thread(copied._mlflow_run, name)
        track(model, {"run_id": "all rows"}, copied._mlflow_run)
    in_thread(copied._mlflow_run, "too late")
    nested = mlflow.MlflowClient().search_runs(["0"], f"tags.mlflow.parentRunId = '{outer.info.run_id}'")
    assert sorted(run.data.params["run_id"] for run in nested) == ["one", "two"]
    assert {run.info.status for run in nested} == {"FINISHED"}
    assert mlflow.get_run(outer.info.run_id).data.params["run_id"] == "all rows"
    assert estimator.copy()._mlflow_run is None
    assert mlflow.active_run() is None


def test_only_the_names_of_the_ranks_environment_are_logged(mlflow, model, monkeypatch):
    monkeypatch.setattr(mlflow_tracking, "log_model", lambda *_, **_more: None)
    with mlflow.start_run() as run:
        track(model, {"backend_env": {"AWS_SECRET_ACCESS_KEY": "hush", "A": None}})
    assert mlflow.get_run(run.info.run_id).data.params == {"backend_env": "A, AWS_SECRET_ACCESS_KEY"}


def test_a_failure_of_mlflow_is_a_warning_and_the_rest_is_still_logged(mlflow, model, caplog, monkeypatch):
    logged = []
    monkeypatch.setattr(mlflow_tracking, "log_model", lambda one, **_more: logged.append(one))
    with mlflow.start_run() as run:
        track(model, {"no name?!": 5})
    assert "The training could not be written to MLflow: " in caplog.text
    assert logged == [model]
    assert mlflow.get_run(run.info.run_id).data.metrics["loss"] == 1.0


def test_a_keras_model_opens_as_a_folder_too(tmp_path):
    network = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    (tmp_path / "exported").mkdir()
    (tmp_path / "folder").mkdir()
    KERAS.export({"model": network, "custom_objects": None}, SCHEMA, tmp_path / "exported")
    files, kept = read_folder(tmp_path / "exported")
    trained = ModelArtifacts(kept, files, SCHEMA, (OutputSpec((1,), "float64", vector=False),), HISTORY)
    pyfunc.write_folder(KerasModel(trained, feature_columns=["w"], output_cols=["found"]), tmp_path / "folder")
    found = pyfunc.load(tmp_path / "folder").predict(TABLE)["found"]
    wanted = network.predict(np.stack(TABLE["w"]), verbose=0)[:, 0]
    np.testing.assert_allclose(found.tolist(), wanted, rtol=1e-6)


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_a_table_without_rows_gets_no_predictions(tmp_path, framework):
    schema = DataSchema((ColumnSpec("n", "int8", (), "feature", "scalar"), *SCHEMA.columns))
    (tmp_path / "exported").mkdir()
    (tmp_path / "folder").mkdir()
    if framework == "torch":
        PLUGIN.export({"model": torch.nn.Linear(3, 1)}, schema, tmp_path / "exported")
    else:
        network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        KERAS.export({"model": network, "custom_objects": None}, schema, tmp_path / "exported")
    files, kept = read_folder(tmp_path / "exported")
    trained = ModelArtifacts(kept, files, schema, (OutputSpec((1,), "float64", vector=False),), HISTORY)
    kind = TorchModel if framework == "torch" else KerasModel
    pyfunc.write_folder(kind(trained, feature_columns=["n", "w"], output_cols=["found"]), tmp_path / "folder")
    found = pyfunc.load(tmp_path / "folder").predict(TABLE.assign(n=1)[:0])
    assert list(found.columns) == ["found"]
    assert found.empty


def test_the_folder_opens_without_pyspark(model, tmp_path):
    more = model.copy().setPredictionFn(lambda network, x: {"low": -network(x).abs(), "both": network(x) * x})
    pyfunc.write_folder(more, tmp_path)
    script = f"""
        import sys
        from pathlib import Path
        sys.modules["pyspark"] = None
        import numpy as np, pandas as pd
        from sparkhvd.estimators.models import mlflow_tracking, pyfunc
        found = pyfunc.load(Path({str(tmp_path)!r})).predict(pd.DataFrame({{"w": [np.array([0.5, 0.25])]}}))
        print(list(found.columns), found["found.low"].iloc[0] <= 0, found["found.both"].iloc[0].shape)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "['found.low', 'found.both'] True (2,)\n", done.stderr
    with pytest.raises(SchemaError, match=r"There is no column 'w'; the table has \['x'\]"):
        pyfunc.load(tmp_path).predict(pd.DataFrame({"x": [1.0]}))
    with pytest.raises(SchemaError, match=r"The table has 2 columns named 'w'\. Keep only one of them"):
        pyfunc.load(tmp_path).predict(pd.DataFrame([[1.0, 2.0]], columns=["w", "w"]))


@dataclass
class RecordingPredictor:
    """A model that records its inputs."""

    inputs: dict[str, np.ndarray] = field(default_factory=dict)

    def predict(self, columns):
        self.inputs.update(columns)
        return [np.zeros(len(next(iter(columns.values()))))]


def pandas_model(predictor, features):
    return pyfunc.PandasModel(predictor, features, (OutputColumn("found", "double"),), (pa.float64(),), 1024)


class SqueezingPredictor:
    def predict(self, columns):
        return [columns["n"].squeeze() * 2]


def test_a_last_batch_of_one_row_is_predicted_although_the_model_squeezes_its_output():
    model = pandas_model(SqueezingPredictor(), (("n", ColumnSpec("n", "int64", (), "feature", "scalar")),))
    table = pd.DataFrame({"n": [3, 4, 5]})
    assert replace(model, batch_size=2).predict(table)["found"].tolist() == [6, 8, 10]


def test_null_in_a_pandas_table_becomes_the_fill_of_the_training():
    whole = ColumnSpec("n", "int64", (), "feature", "scalar", fill=-7)
    pairs = ColumnSpec("v", "float64", (2,), "feature", "vector", fill=0.5)
    model = pandas_model(predictor := RecordingPredictor(), (("n", whole), ("v", pairs)))
    model.predict(pd.DataFrame({"n": [3, None], "v": [None, [1.0, 2.0]]}))
    assert predictor.inputs["n"].tolist() == [3, -7]
    assert predictor.inputs["v"].tolist() == [[0.5, 0.5], [1.0, 2.0]]
    model.predict(pd.DataFrame({"n": pd.array([None, 2**60 + 1], "Int64"), "v": [[1.0, 2.0]] * 2}))
    assert predictor.inputs["n"].tolist() == [-7, 2**60 + 1]


def test_null_without_a_fill_is_refused_unless_it_is_nan_in_a_float_column():
    whole, real = (ColumnSpec("x", dtype, (), "feature", "scalar") for dtype in ("int64", "float32"))
    with pytest.raises(DataError, match="'x' holds NULL in 1 of 2 rows, for which there is no prediction"):
        pandas_model(RecordingPredictor(), (("x", whole),)).predict(pd.DataFrame({"x": [3, None]}))
    pandas_model(predictor := RecordingPredictor(), (("x", whole),)).predict(pd.DataFrame({"x": [3, 4]}))
    assert predictor.inputs["x"].tolist() == [3, 4]
    pandas_model(predictor, (("x", real),)).predict(pd.DataFrame({"x": [3.0, np.nan]}))
    assert np.isnan(predictor.inputs["x"]).tolist() == [False, True]
    with pytest.raises(DataError, match="'x' holds NULL in 1 of 2 rows"):
        pandas_model(predictor, (("x", real),)).predict(pd.DataFrame({"x": pd.array([3.0, None], "Float64")}))


def test_a_sparse_column_of_a_pandas_table_reaches_the_model_as_entries():
    sparse = ColumnSpec("s", "float64", (4,), "feature", "vector", sparse=True, entries=1, fill=0.0)
    vectors = [SparseVector(4, [1, 3], [5.0, 6.0]), None, DenseVector([0.0, 0.0, 7.0, 0.0]), np.zeros(4)]
    pandas_model(predictor := RecordingPredictor(), (("s", sparse),)).predict(pd.DataFrame({"s": vectors}))
    rows, places, values = columns.coordinates(predictor.inputs["s"])
    assert (len(predictor.inputs["s"]), rows.tolist(), places.tolist()) == (4, [0, 0, 2], [1, 3, 2])
    assert values.tolist() == [5.0, 6.0, 7.0]


@pytest.mark.parametrize(
    ("trained", "given", "wanted", "dtype"),
    [
        ("int8", [1.75, 300.0], [1.75, 300.0], "float64"),
        ("int8", [1, 300], [1, 300], "int64"),
        ("int64", pd.array([2**60 + 1, 2], "Int64"), [2**60 + 1, 2], "int64"),
        ("float32", [0.1, 1.0], [0.1, 1.0], "float64"),
        ("float32", [16777217, 1], [16777217, 1], "int64"),
        ("bool", [2.5, 0.0], [2.5, 0.0], "float64"),
        ("float64", [True, False], [True, False], "bool"),
        ("int32", np.array([200, 1], "uint8"), [200, 1], "int16"),
    ],
)
def test_numbers_of_a_pandas_table_keep_their_type(trained, given, wanted, dtype):
    column = ColumnSpec("x", trained, (), "feature", "scalar")
    pandas_model(predictor := RecordingPredictor(), (("x", column),)).predict(pd.DataFrame({"x": given}))
    assert (predictor.inputs["x"].tolist(), predictor.inputs["x"].dtype) == (wanted, dtype)
    rows = ColumnSpec("x", trained, (2,), "feature", "array")
    pandas_model(predictor := RecordingPredictor(), (("x", rows),)).predict(
        pd.DataFrame({"x": [np.asarray(given)[:2]] * 3})
    )
    assert predictor.inputs["x"].tolist() == [wanted] * 3


def test_a_fill_that_the_column_type_cannot_hold_is_not_rounded():
    column = ColumnSpec("x", "float64", (), "feature", "scalar", fill=0.5)
    table = pd.DataFrame({"x": pd.array([3, None], "Int64")})
    pandas_model(predictor := RecordingPredictor(), (("x", column),)).predict(table)
    assert predictor.inputs["x"].tolist() == [3.0, 0.5]


def test_predict_refuses_the_columns_that_transform_refuses():
    column = ColumnSpec("x", "float64", (), "feature", "scalar")
    pairs = replace(column, shape=(2,), kind="array")
    for values, spec, error, message in (
        (["1.5", "2"], column, SchemaError, "'x' holds str values; the model takes numbers"),
        ([[1.0], [2.0]], column, DataError, r"rows of shape \[1\]; the model was trained with rows of shape \[\]"),
        ([[1.0] * 4] * 2, pairs, DataError, r"rows of shape \[4\]; the model was trained with rows of shape \[2\]"),
        ([[1.0, 2.0], [1.0]], pairs, DataError, "'x' has rows of different shapes"),
    ):
        with pytest.raises(error, match=message):
            pandas_model(RecordingPredictor(), (("x", spec),)).predict(pd.DataFrame({"x": values}))


def nested(parts):
    """Return an array of objects, as ``toPandas`` does for arrays of arrays."""
    array = np.empty(len(parts), object)
    array[:] = [np.asarray(part) for part in parts]
    return array


@pytest.mark.parametrize(
    ("values", "trained", "shape", "wanted"),
    [
        ([Decimal("0.10"), Decimal("2.50")], "float64", (), [0.1, 2.5]),
        ([Decimal(3), Decimal(4)], "float64", (), [3.0, 4.0]),
        ([Decimal(2**53 + 1), Decimal(4)], "int64", (), [2**53 + 1, 4]),
        ([Decimal("0.5"), Decimal(4)], "int64", (), [0.5, 4.0]),
        ([[Decimal("0.5"), Decimal(1)], [Decimal(2), Decimal(3)]], "float64", (2,), [[0.5, 1.0], [2.0, 3.0]]),
        ([nested([[1.0, 2.0], [3.0, 4.0]])] * 2, "float64", (2, 2), [[[1.0, 2.0], [3.0, 4.0]]] * 2),
        ([nested([nested([[1, 2]])])] * 2, "int64", (1, 1, 2), [[[[1, 2]]]] * 2),
    ],
)
def test_decimals_and_nested_arrays_of_to_pandas_are_numbers_as_in_transform(values, trained, shape, wanted):
    column = ColumnSpec("x", trained, shape, "feature", "array" if shape else "scalar")
    array = feature_array(pd.Series(values), column)
    assert array.tolist() == wanted
    assert array.dtype == np.asarray(wanted).dtype


@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred:UserWarning")
def test_the_signature_of_a_logged_model_accepts_the_columns_that_transform_accepts(mlflow, tmp_path):
    schema = DataSchema((ColumnSpec("n", "int8", (), "feature", "scalar"), *SCHEMA.columns))
    network = TwoInputs()
    PLUGIN.export({"model": network}, schema, tmp_path)
    files, kept = read_folder(tmp_path)
    trained = ModelArtifacts(kept, files, schema, (OutputSpec((), "float64", vector=False),), HISTORY)
    with mlflow.start_run():
        mlflow_tracking.log_model(TorchModel(trained, feature_columns=["n", "w"], output_cols=["found"]))
    (logged,) = mlflow.search_logged_models(output_format="list")
    opened = mlflow.pyfunc.load_model(logged.model_uri)
    assert opened.metadata.get_input_schema().input_names() == ["n", "w"]
    assert str(opened.metadata.get_output_schema()) == "['found': double (required)]"
    for given in ([1.75, 300.0], [1, 300]):
        table = pd.DataFrame({"n": given, "w": [np.array([0.5, 0.25])] * 2})
        assert opened.predict(table)["found"].tolist() == given
    with pytest.raises(mlflow.exceptions.MlflowException, match=r"missing inputs \['n'\]"):
        opened.predict(table[["w"]])


@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred:UserWarning")
def test_a_logged_model_takes_the_fields_of_a_struct_from_a_column_of_dicts(mlflow, tmp_path):
    schema = DataSchema((ColumnSpec("s.n", "float64", (), "feature", "scalar"), *SCHEMA.columns))
    PLUGIN.export({"model": TwoInputs()}, schema, tmp_path)
    files, kept = read_folder(tmp_path)
    trained = ModelArtifacts(kept, files, schema, (OutputSpec((), "float64", vector=False),), HISTORY)
    with mlflow.start_run():
        mlflow_tracking.log_model(TorchModel(trained, feature_columns=["s.n", "w"], output_cols=["found"]))
    (logged,) = mlflow.search_logged_models(output_format="list")
    opened = mlflow.pyfunc.load_model(logged.model_uri)
    vectors = [np.array([0.5, 0.25])] * 2
    for table in ({"s": [{"n": 1.75}, {"n": 3.0}], "w": vectors}, {"s.n": [1.75, 3.0], "w": vectors}):
        assert opened.predict(pd.DataFrame(table))["found"].tolist() == [1.75, 3.0]


class TwoInputs(torch.nn.Module):
    """Returns the first input."""

    def forward(self, n, w):
        return n + 0 * w.sum(1)


def test_parameters_are_logged_without_addresses(mlflow, model, monkeypatch):
    monkeypatch.setattr(mlflow_tracking, "log_model", lambda *_, **_more: None)
    with mlflow.start_run() as run:
        track(model, {"loss": torch.nn.functional.mse_loss, "callbacks": [object(), "a"]})
    logged = mlflow.get_run(run.info.run_id).data.params
    assert logged == {"loss": "mse_loss", "callbacks": "[object, a]"}


def test_the_folds_of_a_search_name_their_runs(mlflow, model, monkeypatch):
    monkeypatch.setattr(mlflow_tracking, "log_model", lambda *_, **_more: None)
    search = {"__name__": "pyspark.ml.tuning"}
    loop = "def _fit(call, nFolds=2):\n  for i in range(nFolds):\n    call()\n  bestIndex = 0\n  call()\n"
    exec(loop, search)
    parts = []
    search["_fit"](lambda: parts.append(TorchEstimator().copy()._search_part.name))
    assert parts == ["fold 1 of 2", "fold 2 of 2", "all rows"]
    assert TorchEstimator().copy()._search_part == SearchPart()
    with mlflow.start_run() as outer:
        track(model, {"run_id": "one"})
        track(model, {"run_id": "two"}, part=SearchPart("fold 2 of 2"))
    (nested,) = mlflow.MlflowClient().search_runs(["0"], f"tags.mlflow.parentRunId = '{outer.info.run_id}'")
    assert nested.info.run_name == "fold 2 of 2"


@pytest.mark.parametrize(
    ("values", "arrow", "column"),
    [
        (
            [[1.0, None], [None, 2.0]],
            pa.list_(pa.float64()),
            ColumnSpec("x", "float64", (2,), "feature", "array", -1.0),
        ),
        ([[1, None], None], pa.list_(pa.int64()), ColumnSpec("x", "int64", (2,), "feature", "array", 7)),
        (
            [[[1.0, None], None], [[3.0, 4.0], [5.0, 6.0]]],
            pa.list_(pa.list_(pa.float32())),
            ColumnSpec("x", "float32", (2, 2), "feature", "array", 0.5),
        ),
        (
            [[Decimal("1.5"), None], [Decimal("2.5"), Decimal(3)]],
            pa.list_(pa.decimal128(4, 1)),
            ColumnSpec("x", "float64", (2,), "feature", "array", -1.0),
        ),
        ([["a", None], ["b", "c"]], pa.list_(pa.string()), ColumnSpec("x", "str", (2,), "feature", "array", "z")),
    ],
)
@pytest.mark.parametrize("as_arrow_does", [False, True])
def test_the_fill_replaces_null_inside_of_arrays_like_in_transform(values, arrow, column, as_arrow_does):
    array = pa.array(values, arrow)
    series = array.to_pandas() if as_arrow_does else pd.Series(values)
    expected = columns.to_numpy(array, column, "the DataFrame")
    assert feature_array(series, column).tolist() == expected.tolist()


def test_null_inside_of_an_array_without_a_fill_is_refused():
    column = ColumnSpec("x", "int64", (2,), "feature", "array")
    for value in ([1, None], np.array([1.0, np.nan])):
        with pytest.raises(DataError, match=r"Feature column 'x' holds NULL inside of arrays.*fill them"):
            feature_array(pd.Series([value]), column)
    kept = feature_array(pd.Series([np.array([1.0, np.nan])]), replace(column, dtype="float64"))
    assert np.isnan(kept).tolist() == [[False, True]]


def test_metrics_and_parameters_that_mlflow_refuses_are_left_out_with_one_warning(mlflow, model, monkeypatch, caplog):
    monkeypatch.setattr(mlflow_tracking, "log_model", lambda *_, **_more: None)
    history = tuple(EpochRecord(epoch, {"loss": 1.0, "f1@0.5!": 2.0}, {"loss": 1.5}) for epoch in range(3))
    refusing = TorchModel(replace(model.trained, history=history), feature_columns=["w"], output_cols=["found"])
    with mlflow.start_run() as run:
        track(refusing, {"batch_size": 5, "trial.width!": 3, "run_id": None})
    losses = mlflow.MlflowClient().get_metric_history(run.info.run_id, "val_loss")
    assert [metric.step for metric in losses] == [0, 1, 2]
    assert mlflow.get_run(run.info.run_id).data.params == {"batch_size": "5"}
    warnings = [record.getMessage() for record in caplog.records if record.name == mlflow_tracking.__name__]
    assert len(warnings) == 2
    assert warnings[0].startswith("MLflow refuses the parameters 'trial.width!', and the others are logged: ")
    assert warnings[1].startswith("MLflow refuses the metrics 'f1@0.5!', and the others are logged: ")


@pytest.mark.parametrize("name", ["it's one", 'it\'s "one"'])
def test_a_later_fit_of_the_same_trial_continues_its_run(mlflow, model, monkeypatch, name):
    monkeypatch.setattr(mlflow_tracking, "log_model", lambda *_, **_more: None)
    part = SearchPart("trial 0", {"epochs": 2}, is_resumed=True)
    first = TorchModel(replace(model.trained, history=HISTORY[:1]), feature_columns=["w"], output_cols=["found"])
    with mlflow.start_run() as parent:
        pass
    client = mlflow.MlflowClient()
    client.update_run(parent.info.run_id, status="RUNNING")
    for fitted, epochs in ((first, 1), (model, 2)):
        track(fitted, {"run_id": name, "epochs": epochs}, parent.info.run_id, part)
    track(model, {"run_id": "another", "epochs": 2}, parent.info.run_id, part)
    condition = f"tags.mlflow.parentRunId = '{parent.info.run_id}'"
    runs = {run.data.tags["sparkhvd.run_id"]: run for run in client.search_runs(["0"], condition)}
    assert set(runs) == {name, "another"}
    assert [(run.info.status, run.data.params["epochs"]) for run in runs.values()] == [("FINISHED", "2")] * 2
    losses = client.get_metric_history(runs[name].info.run_id, "val_loss")
    assert [(metric.step, metric.value) for metric in losses] == [(0, 2.5), (1, 1.5)]


def test_a_run_of_automatic_logging_holds_the_fit(mlflow, model, monkeypatch):
    """MLflow's automatic logging of Spark ML writes the parameters in its own form before the fit."""
    monkeypatch.setattr(mlflow_tracking, "log_model", lambda *_, **_more: None)
    with mlflow.start_run() as run:
        mlflow.set_tag("estimator_class", "sparkhvd.estimators.torch.estimator.TorchEstimator")
        mlflow.log_params({"loss": "<function mse_loss at 0x7f>", "batch_size": 5})
        track(model, {"loss": torch.nn.functional.mse_loss, "batch_size": 5, "run_id": "one"})
    data = mlflow.get_run(run.info.run_id).data
    assert data.metrics["val_loss"] == 1.5
    assert data.params == {"loss": "<function mse_loss at 0x7f>", "batch_size": "5", "run_id": "one"}
    assert len(mlflow.search_runs(output_format="list")) == 1
