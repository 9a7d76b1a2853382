from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.feature import VectorAssembler

from sparkhvd import KerasEstimator, KerasModel, Store
from sparkhvd.errors import ModelOutputError, ParamError, SchemaError
from sparkhvd.keras.callbacks import BestModelCheckpoint
from tests.scripts import results_of, run_script

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store.create(str(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
def xor(spark):
    """Return a noisy exclusive or: the label is 1 if exactly one of the two columns is near 1."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 2, (301, 2))
    noisy = bits + 0.1 * random.normal(size=bits.shape)
    rows = [(float(a), float(b), int(x ^ y)) for (a, b), (x, y) in zip(noisy, bits, strict=True)]
    df = spark.createDataFrame(rows, "a double, b double, y int").coalesce(2).cache()
    df.count()
    yield df
    df.unpersist()


def predictions(model, df):
    """Return the rows of ``transform`` in one partition, so that one of Spark's Python workers imports Keras."""
    return model.transform(df.coalesce(1))


def network(outputs=2):
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((2,)),
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.Dense(outputs, activation="softmax"),
    ]
    return keras.Sequential(layers)


def estimator(store, **more):
    params = {
        "num_proc": 2,
        "store": store,
        "model": network(),
        "optimizer": keras.optimizers.Adam(0.05),
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
        "feature_cols": ["a", "b"],
        "label_cols": ["y"],
        "validation": 0.2,
        "batch_size": 16,
        "epochs": 4,
        "random_seed": 7,
        "verbose": 0,
    }
    return KerasEstimator(**{**params, **more})


def test_a_model_stops_early_predicts_like_keras_and_survives_saving(xor, store, tmp_path):
    patience = keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=0.02, patience=2)
    model = network()
    before = [weight.copy() for weight in model.get_weights()]
    trained = estimator(store, model=model, callbacks=[patience], epochs=30).fit(xor)
    history = trained.getHistory()
    assert 3 <= len(history) < 30, "EarlyStopping must have ended the training"
    assert history[-1]["validation"]["loss"] < 0.3
    assert {"accuracy": history[-1]["train"]["all_metrics"][0]["accuracy"]} == history[-1]["train"]["all_metrics"][0]
    for one, two in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two, "the given model must not change")
    rows = predictions(trained, xor).select("a", "b", "y", "y__output").collect()
    predicted = np.array([row["y__output"].toArray() for row in rows])
    native = trained.getModel().predict(np.array([[row["a"], row["b"]] for row in rows], np.float32), verbose=0)
    np.testing.assert_allclose(predicted, native, rtol=1e-5, atol=1e-7)
    assert (predicted.argmax(axis=1) == [row["y"] for row in rows]).mean() > 0.95
    trained.save(str(tmp_path / "saved"))
    loaded = KerasModel.load(str(tmp_path / "saved"))
    assert loaded.getHistory() == trained.getHistory()
    assert predictions(loaded, xor).select("a", "b", "y", "y__output").collect() == rows


def test_a_pipeline_with_an_assembler_trains_and_resumes(xor, store, tmp_path):
    steps = [VectorAssembler(inputCols=["a", "b"], outputCol="v")]
    keep = {"checkpoint_callback": BestModelCheckpoint(monitor="loss"), "run_id": "keras-run"}
    short = estimator(store, feature_cols=["v"], epochs=1, validation=None, **keep)
    Pipeline(stages=[*steps, short]).fit(xor)
    more = estimator(store, feature_cols=["v"], epochs=2, validation=None, **keep)
    trained = Pipeline(stages=[*steps, more]).fit(xor).stages[-1]
    continued = trained.getHistory()
    whole = estimator(store, feature_cols=["v"], epochs=2, validation=None, backend="local")
    undisturbed = Pipeline(stages=[*steps, whole]).fit(xor).stages[-1].getHistory()
    assert [record["epoch"] for record in continued] == [0, 1]
    with store.open("runs/keras-run/saved/best.keras", "rb") as file:
        (tmp_path / "best.keras").write_bytes(file.read())
    best = keras.saving.load_model(tmp_path / "best.keras")
    for one, other in zip(best.get_weights(), trained.getModel().get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert continued[-1]["train"]["loss"] == pytest.approx(undisturbed[-1]["train"]["loss"], rel=1e-5)


def test_invalid_parameters_are_refused_before_any_job(xor, store):
    for changes, error, message in [
        ({"loss": None}, ParamError, "needs loss"),
        ({"feature_cols": ["a"], "label_cols": ["y", "b"]}, ParamError, "1 output"),
        ({"loss": "categorical_crossentropy"}, ModelOutputError, "The loss or a metric cannot compare"),
    ]:
        with pytest.raises(error, match=message):
            estimator(store, **changes).fit(xor)


def test_a_wrapped_model_predicts_in_named_inputs_with_a_function_and_in_label_types(xor):
    inputs = {name: keras.Input((1,), name=name) for name in ("b", "a")}
    hidden = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
    native = keras.Model(inputs, keras.layers.Dense(2, name="scores")(hidden))
    model = KerasModel.from_model(native, xor, feature_cols=["a", "b"], label_cols=["y"])
    rows = predictions(model, xor).select("a", "b", "y__output").collect()
    given = {name: np.array([[row[name]] for row in rows], np.float32) for name in ("a", "b")}
    wanted = native.predict(given, verbose=0)
    np.testing.assert_allclose([row["y__output"].toArray() for row in rows], wanted, rtol=1e-5, atol=1e-6)
    model.setPredictionFn(lambda model, x: keras.ops.softmax(model(x))).setOutputTypes(["label"])
    best = predictions(model, xor)
    assert best.dtypes[-1] == ("y__output", "int")
    assert [row["y__output"] for row in best.collect()] == wanted.argmax(axis=1).tolist()


@pytest.fixture(scope="module")
def reviews(spark):
    """Return reviews: a sentence, the kind and price of a thing, and whether it is liked."""
    random = np.random.default_rng(1)
    words = ["the", "a", "quite", "good", "bad", "größer"]
    rows = []
    for number in range(160):
        verdict = "good" if number % 2 else "bad"
        text = [*random.choice(words[:3], 2), verdict, words[5]]
        rows.append((" ".join(text), ["cup", "pot", None][number % 3], float(number % 5), number % 2))
    return spark.createDataFrame(rows, "review string, kind string, price double, liked int")


def reader_of_texts(reviews):
    """Return a model of strings that has adapted its vocabulary to the rows."""
    keras.utils.set_random_seed(2)
    vectorize = keras.layers.TextVectorization(max_tokens=20, output_sequence_length=4)
    vectorize.adapt([row["review"] for row in reviews.collect()])
    lookup = keras.layers.StringLookup(vocabulary=["cup", "pot", "none"], output_mode="one_hot")
    inputs = {
        "review": keras.Input((1,), dtype="string", name="review"),
        "kind": keras.Input((), dtype="string", name="kind"),
        "price": keras.Input((1,), name="price"),
    }
    words = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20, 4)(vectorize(inputs["review"])))
    joined = keras.layers.Concatenate()([words, lookup(inputs["kind"]), inputs["price"]])
    return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid", name="liked")(joined))


def test_texts_reach_the_preprocessing_layers_of_a_model(reviews, store, tmp_path, capsys):
    params = {
        "model": reader_of_texts(reviews),
        "loss": "binary_crossentropy",
        "feature_cols": ["review", "kind", "price"],
        "label_cols": ["liked"],
        "fill": {"kind": "none"},
    }
    estimated = estimator(store, **params, epochs=8)
    estimated.describe(reviews)
    assert "feature review: str" in capsys.readouterr().out
    trained = estimated.fit(reviews)
    assert trained.getHistory()[-1]["validation"]["all_metrics"][0]["accuracy"] > 0.9
    rows = predictions(trained, reviews).select("review", "kind", "price", "liked__output").collect()
    columns = {
        "review": np.array([[row["review"]] for row in rows], object),
        "kind": np.array([row["kind"] or "none" for row in rows], object),
        "price": np.array([[row["price"]] for row in rows], np.float32),
    }
    native = trained.getModel()({name: keras.ops.convert_to_tensor(values) for name, values in columns.items()})
    predicted = [row["liked__output"] for row in rows]
    np.testing.assert_allclose(predicted, np.array(native)[:, 0], rtol=1e-5, atol=1e-6)
    trained.save(str(tmp_path / "saved"))
    loaded = KerasModel.load(str(tmp_path / "saved"))
    assert [row["liked__output"] for row in predictions(loaded, reviews).collect()] == predicted
    with pytest.raises(SchemaError, match="'price' does not hold strings, which the model was trained on"):
        trained.setFeatureColumns(["price", "kind", "liked"]).transform(reviews)


@pytest.mark.soak
def test_keras_on_pytorch_trains_as_one_big_batch_and_predicts(tmp_path):
    script = Path(__file__).with_name("keras_torch_script.py")
    results = results_of(run_script([sys.executable, script], tmp_path / "of the script", 580, KERAS_BACKEND="torch"))
    assert results["moved"] > 0.05
    assert results["difference"] < 1e-5, "one fit continued the training of another fit"
    assert results["transform"] < 1e-6
    assert results["loaded"]
    assert len(results["history"]) == 2
    assert results["history"][1]["train"]["loss"] < results["history"][0]["train"]["loss"]
    assert [list(group) for group in results["history"][0]["train"]["all_metrics"]] == [["mae"]]
