"""Decisions and rejections of KerasEstimator on the driver."""

from __future__ import annotations

import sys

import keras
import numpy as np
import pytest
import torch

import sparkhvd.keras as hvd
from sparkhvd.data import DataSchema
from sparkhvd.errors import ConfigError, ModelOutputError, ParamError, SchemaError
from sparkhvd.estimators.api.validation import check_monitored_metrics
from sparkhvd.estimators.keras import KerasEstimator
from sparkhvd.estimators.keras.losses.names import check_names
from sparkhvd.estimators.keras.plugin import PLUGIN
from sparkhvd.estimators.keras.serialization import artifact
from sparkhvd.estimators.params.named_inputs import named_inputs
from sparkhvd.estimators.params.policies import Checkpoints, EarlyStopping
from sparkhvd.keras.callbacks import BestModelCheckpoint
from sparkhvd.world import World
from tests.scripts import run_script
from tests.unit.estimators.arrays import schema, spec
from tests.unit.estimators.keras.networks import DATA, WEIGHTED, network, parameters, rows


def plan_with_callback(callback, **more):
    params = {"store": None, "loss": "mse", "feature_cols": ["x"], "label_cols": ["y"], **more}
    return KerasEstimator(model=network(), checkpoint_callback=callback, **params)._checked_plan()


def test_the_checkpoint_callback_selects_the_trained_model():
    best = BestModelCheckpoint(monitor="val_accuracy")
    assert plan_with_callback(best, validation=0.1, metrics=["accuracy"]).checkpoints == Checkpoints(
        best="val_accuracy", mode="max"
    )
    best = BestModelCheckpoint(monitor="mae")
    assert plan_with_callback(best, metrics=[keras.metrics.MeanAbsoluteError(name="mae")]).checkpoints.mode == "min"
    best = BestModelCheckpoint(monitor="mine", mode="max")
    assert plan_with_callback(best).checkpoints == Checkpoints(best="mine", mode="max")


@pytest.mark.parametrize(("operator", "mode"), [(np.less, "min"), (np.greater, "max")])
def test_the_checkpoint_callback_of_keras_before_3_11_has_an_operator_instead_of_a_mode(operator, mode):
    best = BestModelCheckpoint(monitor="mine")
    del best.mode
    best.monitor_op = operator
    assert plan_with_callback(best).checkpoints == Checkpoints(best="mine", mode=mode)


def test_a_checkpoint_callback_may_monitor_the_validation_rows_of_files():
    plan = plan_with_callback(BestModelCheckpoint())
    check_monitored_metrics(PLUGIN.monitors(plan.params), held_out=True)
    with pytest.raises(ParamError, match="checkpoint_callback monitors 'val_loss', but this fit has no valid"):
        check_monitored_metrics(PLUGIN.monitors(plan.params), held_out=False)


@pytest.mark.parametrize(
    ("callback", "more", "message"),
    [
        (keras.callbacks.EarlyStopping(), {}, "must be a keras.callbacks.ModelCheckpoint"),
        (BestModelCheckpoint(monitor="mine"), {}, "Create the callback with mode='min' or mode='max'"),
        (BestModelCheckpoint(monitor="loss"), {"checkpoints": Checkpoints(best="mae")}, "leave one of them out"),
        (keras.callbacks.ModelCheckpoint("x.keras"), {}, "keeps its files in a Store, but no store is set"),
        (
            keras.callbacks.ModelCheckpoint("x.keras", "loss", save_best_only=True, save_freq=3),
            {},
            "save_best_only=True and save_freq=3",
        ),
    ],
)
def test_an_invalid_checkpoint_callback_is_rejected(callback, more, message):
    with pytest.raises(ParamError, match=message):
        plan_with_callback(callback, **more)


@keras.saving.register_keras_serializable("tests")
class Doubled(keras.layers.Layer):
    def call(self, values):
        return values * 2


def two_inputs_and_outputs():
    first, second = keras.Input((2,), name="first"), keras.Input((1,), name="second")
    joined = keras.layers.Concatenate()([Doubled()(first), second])
    return keras.Model(
        {"first": first, "second": second},
        {"small": keras.layers.Dense(1, name="small")(joined), "large": keras.layers.Dense(3, name="large")(joined)},
    )


def test_columns_are_matched_by_name_before_order():
    data = schema(
        second=("feature", "float32", (), "scalar"),
        first=("feature", "float32", (2,), "array"),
        large=("label", "int64", (), "scalar"),
        small=("label", "float32", (), "scalar"),
    )
    params = parameters(
        data,
        model=two_inputs_and_outputs(),
        loss={"small": "mse", "large": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
        metrics={"small": ["mae"]},
    )
    assert PLUGIN.check(params, data, None) == [(3,), (1,)]
    stopping = EarlyStopping("val_small_mae")
    PLUGIN.check({**params, "early_stopping": stopping}, data, None)
    with pytest.raises(ParamError, match="early_stopping monitors 'val_small_mae', but an epoch reports loss"):
        PLUGIN.check({**params, "metrics": {"large": ["accuracy"]}, "early_stopping": stopping}, data, None)
    printed = PLUGIN.mapping(params, data)
    assert "'first' is first as rows x [2]" in printed
    assert "'large' is large" in printed
    trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(data), World(0, 1, 0, 1, 0, 1))
    assert "Doubled" in {type(layer).__name__ for layer in trainer._model.layers}


class WithoutName(keras.metrics.Mean):
    def __init__(self):
        super().__init__(name="mine")


def failing_loss(label, output):
    raise KeyError("my bug")


def user_rate():
    return 0.25


def stateful_lstm():
    steps = keras.layers.Reshape((6, 1))
    return keras.Sequential([keras.Input(batch_shape=(2, 6)), steps, keras.layers.LSTM(3, stateful=True)])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "no"}, ParamError, "must be a keras.Model"),
        ({"optimizer": None}, ParamError, "needs optimizer"),
        ({"model": keras.Sequential([keras.layers.Dense(1)])}, ParamError, "not built"),
        (
            {"model": keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])},
            ModelOutputError,
            "(?s)cannot take.*input_shapes",
        ),
        (
            {"optimizer": keras.optimizers.SGD(gradient_accumulation_steps=2), "backward_passes_per_step": 2},
            ParamError,
            "gradient_accumulation_steps=2 both accumulate",
        ),
        *(
            (
                {"model": keras.Sequential([keras.Input((6,)), keras.layers.Dense(outputs)]), "loss": "mse"},
                ModelOutputError,
                "(?s)The loss or a metric cannot compare",
            )
            for outputs in (2, 3)
        ),
        (
            {"loss": keras.losses.CategoricalCrossentropy()},
            ModelOutputError,
            "(?s)The loss or a metric cannot compare.*class numbers need loss='sparse_categorical_crossentropy'",
        ),
        (
            {"model": torch.nn.Linear(6, 3)},
            ParamError,
            r"is a Linear; it must be a keras.Model\. Use TorchEstimator for PyTorch objects",
        ),
        (
            {"optimizer": torch.optim.SGD(torch.nn.Linear(6, 3).parameters(), lr=0.1)},
            ParamError,
            r"needs optimizer: an instance such as keras.*Use TorchEstimator for PyTorch objects",
        ),
        (
            {"loss": torch.nn.MSELoss()},
            ParamError,
            "MSELoss does not compute with the tensors of Keras on tensorflow. Use TorchEstimator for PyTorch",
        ),
        (
            {"loss": "sparse_categorical_crossentopy"},
            ParamError,
            "(?s)loss: .* Did you mean 'sparse_categorical_crosse",
        ),
        ({"loss": {"y": ["no such thing"]}}, ParamError, "(?s)does not know 'no such thing'.*Pass a name from keras"),
        ({"metrics": ["acuracy"]}, ParamError, "metrics: Keras does not know 'acuracy'. Did you mean 'accuracy'"),
        ({"optimizer": "adm"}, ParamError, "optimizer: Keras does not know 'adm'. Did you mean 'adam'"),
        (
            {"loss": failing_loss},
            ModelOutputError,
            r"(?s)raised KeyError: 'my bug' \(line \d+ of test_driver_side.py, in failing_loss: ",
        ),
        (
            {"early_stopping": EarlyStopping("val_acc")},
            ParamError,
            "(?s)early_stopping monitors 'val_acc'.*'val_accuracy'",
        ),
        ({"checkpoints": Checkpoints(best="los")}, ParamError, "checkpoints monitors 'los'.* Did you mean 'loss'"),
        (
            {"optimizer": keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 5)), "scale_lr": True},
            ParamError,
            "scale_lr=True needs a constant learning rate",
        ),
        ({"optimizer": keras.optimizers.SGD(user_rate), "scale_lr": True}, ParamError, "schedule or function. Scale"),
        (
            {"metrics": [WithoutName()]},
            ParamError,
            "(?s)cannot be rebuilt: .*unexpected keyword argument 'name'.*base class",
        ),
        ({"optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())}, ParamError, "mixed_bfloat16"),
        ({"model": stateful_lstm()}, ParamError, "put a whole sequence into each row"),
        ({"callbacks": [keras.callbacks.BackupAndRestore("some")]}, ParamError, "with store and run_id, fit itself"),
    ],
)
def test_invalid_parameters_are_rejected_on_the_driver(changes, error, message):
    with pytest.raises(error, match=message):
        PLUGIN.check(parameters(**changes), DATA, None)


def mean_of_all_rows(y_true, y_pred):
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True))


def test_a_loss_that_is_one_number_for_all_rows_takes_no_weights():
    with pytest.raises(ParamError, match="one number for all rows of a batch, so sample_weight_col cannot weight the"):
        PLUGIN.check(parameters(WEIGHTED, loss=mean_of_all_rows, sample_weight_col="w"), WEIGHTED, None)
    PLUGIN.check(parameters(WEIGHTED, sample_weight_col="w"), WEIGHTED, None)
    PLUGIN.check(parameters(loss=mean_of_all_rows), DATA, None)


def model_with_inputs(*inputs):
    """Return a model with inputs of these names and dtypes; the tests never run it."""
    model_inputs = [keras.Input((1,), dtype=dtype, name=name) for name, dtype in inputs]
    looked_up = [
        keras.layers.StringLookup(vocabulary=["a"])(each) if each.dtype == "string" else each for each in model_inputs
    ]
    return keras.Model(model_inputs, keras.layers.Dense(3)(keras.layers.Concatenate()(looked_up)))


@pytest.mark.parametrize(
    ("inputs", "dtypes", "error", "message"),
    [
        ([("x", "float32"), ("z", "float32")], ("str", "float32"), ParamError, "'x' holds text, but .* takes float32"),
        (
            [("x", "string"), ("z", "float32")],
            ("int64", "float32"),
            ParamError,
            "takes strings, .* does not hold text. Cast",
        ),
        ([("x", "string"), ("z", "float32")], ("bytes", "float32"), SchemaError, "'x' has the type binary"),
        ([("x", "string"), ("z", "float32")], ("str", "datetime64[D]"), SchemaError, "'z' has the type date"),
    ],
)
def test_text_columns_are_passed_only_to_string_inputs(inputs, dtypes, error, message):
    first, second = dtypes
    data = schema(
        x=("feature", first, (), "scalar"), z=("feature", second, (), "scalar"), y=("label", "int64", (), "scalar")
    )
    with pytest.raises(error, match=message):
        PLUGIN.check(parameters(data, model=model_with_inputs(*inputs)), data, None)


def test_text_and_numbers_are_not_concatenated_and_labels_are_numbers():
    data = schema(
        x=("feature", "str", (), "scalar"), z=("feature", "float32", (), "scalar"), y=("label", "str", (), "scalar")
    )
    model = WithUserStep()
    model(keras.ops.zeros((1, 6)))
    with pytest.raises(ParamError, match="'x' holds text, but the input 'input' takes numbers"):
        PLUGIN.check(parameters(data, model=model), data, None)
    for text in ("string", "str"):
        inputs = named_inputs("inputs", {"a": {"columns": ["x", "z"], "dtype": text}})
        with pytest.raises(ParamError, match="The input 'a' takes strings, but the column 'z' does not hold text"):
            PLUGIN.check(parameters(data, model=model_with_inputs(("a", "string")), inputs=inputs), data, None)
    with pytest.raises(SchemaError, match="'y' has the type string, which cannot be a label"):
        PLUGIN.check(parameters(data, model=model_with_inputs(("x", "string"), ("z", "float32"))), data, None)


def test_outputs_in_a_dict_are_named_by_its_keys_and_returned_in_label_order(tmp_path):
    inputs = keras.Input((1,), name="x")
    outputs = {
        "b": keras.layers.Rescaling(2.0, name="one")(inputs),
        "a": keras.layers.Rescaling(3.0, name="two")(inputs),
    }
    model = keras.Model(inputs, outputs)
    labels = dict.fromkeys(("b", "a"), ("label", "float32", (), "scalar"))
    data = schema(x=("feature", "float32", (), "scalar"), **labels)
    params = parameters(data, model=model, optimizer="sgd", loss={"a": "mse", "b": "mae"}, metrics=None)
    assert "inputs: 'x' is x" in PLUGIN.mapping(params, data)
    assert PLUGIN.check(params, data, None) == [(1,), (1,)]
    PLUGIN.export(params, data, tmp_path)
    columns = {"x": np.array([1.0, 5.0], np.float32)}
    assert [each.ravel().tolist() for each in PLUGIN.predictor(tmp_path).predict(columns)] == [[2.0, 10.0], [3.0, 15.0]]


def test_a_loss_that_is_not_a_mean_over_the_rows_is_rejected():
    for reduction in ("sum", "mean_with_sample_weight"):
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        with pytest.raises(ParamError, match=f"mean_squared_error has reduction='{reduction}'; it must be 'sum_over"):
            PLUGIN.pack(parameters(loss=[loss], sample_weight_col="w"))
    PLUGIN.pack(parameters(loss=loss, sample_weight_col=None))  # without weights, this reduction is the mean


def test_a_metric_of_several_numbers_is_rejected():
    data = schema(x=("feature", "float32", (6,), "array"), y=("label", "float32", (3,), "array"))
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    params = parameters(data, model=model, loss="mse", metrics=[keras.metrics.F1Score()])
    with pytest.raises(ParamError, match=r"'f1_score' returns an array of shape \[3\], .*average='macro'"):
        PLUGIN.check(params, data, None)


def test_a_multi_optimizer_is_rejected():
    multi_optimizer = getattr(keras.optimizers, "MultiOptimizer", None)
    if multi_optimizer is None:
        pytest.skip("this Keras has no MultiOptimizer")
    data = schema(x=("feature", "float32", (6,), "array"), y=("label", "float32", (1,), "array"))
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    params = parameters(
        data, model=model, loss="mse", optimizer=multi_optimizer([(keras.optimizers.SGD(), model.layers)])
    )
    with pytest.raises(ConfigError, match="MultiOptimizer cannot be distributed"):
        PLUGIN.check(params, data, None)


@pytest.mark.parametrize("optimizer", ["Adam", "sgd"])
@pytest.mark.parametrize("loss", ["ce", "CrossEntropy", "mse", {"class_name": "Huber", "config": {"name": "mine"}}])
@pytest.mark.parametrize(
    "metrics", [["Acc", "mae"], ["sparse_categorical_accuracy", keras.metrics.Mean()], [failing_loss]]
)
def test_names_that_keras_knows_are_accepted(optimizer, loss, metrics):
    check_names(optimizer, {"y": loss}, metrics)


def test_short_names_of_losses_are_not_metrics():
    with pytest.raises(ParamError, match="metrics: Keras does not know 'ce'"):
        check_names("sgd", "ce", ["ce"])


class WithUserStep(keras.Model):
    """A model whose user-defined step reports additional metrics."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.layer = keras.layers.Dense(3)

    def call(self, values):
        return self.layer(values)

    def train_step(self, data):
        return {**super().train_step(data), "mine": 1.0}


def test_a_user_defined_step_may_report_any_metric():
    model = WithUserStep()
    model(keras.ops.zeros((1, 6)))
    params_with_stopping = parameters(model=model, early_stopping=EarlyStopping("mine"))
    assert PLUGIN.check(params_with_stopping, DATA, None) == [(3,)]


class WithOwnOptimizers(WithUserStep):
    """A model whose user-defined training step uses additional optimizers."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD())
        self.against = [keras.optimizers.Adam()]


def test_optimizers_in_a_user_defined_step_are_rejected_if_ranks_would_diverge():
    model = WithOwnOptimizers()
    model(keras.ops.zeros((1, 6)))
    content = PLUGIN.pack(parameters(model=model))
    PLUGIN.trainer(content, spec(DATA), World(0, 1))
    with pytest.raises(ParamError, match=r"optimizers of its own \(against\)"):
        PLUGIN.trainer(content, spec(DATA), World(0, 2))


def test_a_fitted_model_starts_another_training_with_its_optimizer():
    model = network()
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss=parameters()["loss"])
    columns = rows(8)
    model.fit(columns["x"], columns["y"], verbose=0)
    trainer = PLUGIN.trainer(PLUGIN.pack(parameters(model=model, optimizer=None)), spec(DATA), World())
    for mine, columns in zip(trainer._model.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), columns.numpy())
    assert int(trainer._model.optimizer.iterations) == 1


class WithTwoOutputs(keras.Model):
    """A model that returns its outputs in one of the structures of Keras."""

    def __init__(self, form="tuple", **settings):
        super().__init__(**settings)
        self.form = form
        self.heads = [keras.layers.Dense(3), keras.layers.Dense(1)]

    def call(self, values):
        first, second = (head(values) for head in self.heads)
        return {"tuple": (first, second), "dict": {"y": first, "z": second}}[self.form]

    def get_config(self):
        return {**super().get_config(), "form": self.form}


def test_the_outputs_of_a_subclass_have_the_names_and_order_of_the_labels(tmp_path):
    data = schema(
        x=("feature", "float64", (6,), "array"),
        y=("label", "int64", (), "scalar"),
        z=("label", "float64", (), "scalar"),
    )
    loss = [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"]

    def params_of(form, data=data, **more):
        model = WithTwoOutputs(form)
        model(keras.ops.zeros((1, 6)))
        return parameters(data, model=model, loss=loss, metrics=None, **more)

    assert PLUGIN.check(params_of("tuple"), data, None) == [(3,), (1,)]
    with pytest.raises(ModelOutputError, match=r"returns a dict of outputs, but a list of outputs.*\['y', 'z'\]"):
        PLUGIN.check(params_of("dict"), data, None)
    unlabelled = DataSchema(data.of("feature"))
    PLUGIN.export(params_of("tuple", unlabelled), unlabelled, tmp_path)
    with pytest.raises(ModelOutputError, match=r"a list of outputs, but one output is expected.* with from_mod"):
        PLUGIN.predictor(tmp_path).predict({"x": np.zeros((2, 6))})


def test_a_class_number_without_an_output_is_rejected_with_the_valid_classes():
    sample = rows(4)
    sample["y"][-1] = 3
    with pytest.raises(ModelOutputError, match=r"(?s)cannot compare.*3 outputs stand for the classes 0 to 2; number"):
        PLUGIN.check(parameters(), DATA, sample)


def test_class_numbers_are_recognized_with_as_many_rows_as_classes():
    two = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, activation="softmax")])
    params = parameters(model=two, loss="categorical_crossentropy", metrics=None)
    sample = {**rows(2), "y": np.array([0, 1])}
    with pytest.raises(ModelOutputError, match=r"class numbers need loss='sparse_categorical_crossentropy'"):
        PLUGIN.check(params, DATA, sample)


def scale_class(factor, package=None):
    class Scale(keras.layers.Layer):
        def call(self, values):
            return factor * values

    return Scale if package is None else keras.saving.register_keras_serializable(package)(Scale)


def model_with_layers(*classes):
    layers = [keras.Input((6,)), *(each() for each in classes), keras.layers.Dense(3, kernel_initializer="ones")]
    return keras.Sequential(layers)


def test_two_classes_or_functions_with_the_same_name_are_rejected():
    two, three = scale_class(2.0), scale_class(3.0)
    with pytest.raises(ParamError, match=r"The name 'Scale' stands for two different classes, .*Rename one"):
        PLUGIN.pack(parameters(model=model_with_layers(two, three)))
    with pytest.raises(ParamError, match="The name 'Scale' stands for two different classes"):
        PLUGIN.pack(parameters(model=model_with_layers(two), custom_objects={"Scale": three}))
    first, second = (lambda _: None), (lambda _: None)
    first.__name__ = second.__name__ = "squash"
    activated = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    activated.layers[0].activation = first
    with pytest.raises(ParamError, match="The name 'squash' stands for two different functions"):
        PLUGIN.pack(parameters(model=activated, custom_objects={"squash": second}))


def test_classes_with_the_same_name_in_different_packages_stay_distinct_in_another_process(tmp_path):
    """Train, export and load in a process that has not registered the classes."""
    model = model_with_layers(scale_class(2.0, "two"), scale_class(3.0, "three"))
    (tmp_path / "payload").write_bytes(PLUGIN.pack(parameters(model=model)))
    done = run_script([sys.executable, "-c", _EXPORT_TWICE], tmp_path, 120.0)
    assert done.returncode == 0, done.stderr
    (predicted,) = PLUGIN.predictor(tmp_path / "again").predict({"x": np.ones((2, 6))})
    np.testing.assert_allclose(predicted, 36.0)


_EXPORT_TWICE = """
from pathlib import Path

from sparkhvd.estimators.keras.serialization import artifact
from sparkhvd.estimators.keras.plugin import PLUGIN
from sparkhvd.world import World
from tests.unit.estimators.arrays import spec
from tests.unit.estimators.keras.networks import DATA

folder = Path.cwd()
trainer = PLUGIN.trainer((folder / "payload").read_bytes(), spec(DATA), World())
for name in ("once", "again"):
    (folder / name).mkdir()
trainer.export(folder / "once")
once = artifact.load_model(folder / "once", compiled=True)
trainer._model = once
trainer.export(folder / "again")
"""


def user_loss(labels, outputs):
    return keras.ops.mean(keras.ops.square(outputs - keras.ops.cast(labels, outputs.dtype)[:, None]), axis=-1)


def user_metric(labels, outputs):
    return keras.ops.mean(outputs, axis=-1) + 0 * keras.ops.cast(labels, outputs.dtype)


def test_a_model_with_a_user_defined_loss_and_metric_is_returned_compiled(tmp_path):
    trainer = PLUGIN.trainer(PLUGIN.pack(parameters(loss=user_loss, metrics=[user_metric])), spec(DATA), World())
    trainer._model.optimizer.build(trainer._model.trainable_variables)
    trainer.export(tmp_path)
    columns = rows(4)
    evaluated = artifact.load_model(tmp_path, compiled=True).evaluate(columns["x"], columns["y"], return_dict=True)
    assert set(evaluated) == {"loss", "user_metric"}


def test_a_function_may_compute_the_learning_rate(tmp_path):
    trainer = PLUGIN.trainer(PLUGIN.pack(parameters(optimizer=keras.optimizers.SGD(user_rate))), spec(DATA), World())
    assert trainer._model.optimizer.learning_rate == 0.25
    trainer.export(tmp_path)
    assert artifact.load_model(tmp_path, compiled=True).optimizer.learning_rate == 0.25


def test_a_backend_without_collectives_is_rejected(monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(ConfigError, match="the backend 'jax', but sparkhvd trains Keras models only on tensorflow and"):
        PLUGIN.check(parameters(), DATA, None)


def test_layers_that_normalize_by_the_batch_of_a_rank_are_found_even_within_nested_models():
    inner = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(name="inner")])
    model = keras.Sequential([keras.Input((4,)), inner, keras.layers.LayerNormalization()])
    layers = PLUGIN.batch_dependence({"model": model, "loss": "mse"})
    assert (layers.local, layers.need_two_rows, layers.losses) == (("inner",), (), ())
    (remark,) = layers.remarks(2, 8)
    assert "SyncBatchNormalization" in remark


def test_the_losses_that_relate_the_rows_of_a_rank_are_found():
    losses = {
        "one": keras.losses.Circle(),
        "two": [keras.losses.Dice(), keras.losses.Dice(axis=-1), keras.losses.Tversky(), keras.losses.Huber()],
    }
    dependence = PLUGIN.batch_dependence({"model": network(), "loss": losses})
    assert dependence.losses == ("circle", "dice", "tversky")
    assert dependence.remarks(1, 8) == []
    (remark,) = dependence.remarks(2, 8)
    assert remark == (
        "the loss circle, dice, tversky relates the rows of a batch and sees the 8 rows of its own rank, not the 16 "
        "rows of all 2 ranks. The training is therefore not that of one big batch; use a larger batch_size to come "
        "closer."
    )


def test_a_keras_without_the_newest_losses_trains(monkeypatch):
    monkeypatch.delattr(keras.losses, "Circle")  # Keras 3.5 lacks this loss
    dependence = PLUGIN.batch_dependence({"model": network(), "loss": [keras.losses.Huber(), keras.losses.Dice()]})
    assert dependence.losses == ("dice",)


def test_metrics_that_keras_cannot_rebuild_are_rejected_before_the_start():
    metric = keras.metrics.AUC(multi_label=True, label_weights=[1.0, 2.0, 3.0])
    with pytest.raises(ParamError, match=r"AUC .*get_config\(\) contains a tensor"):
        PLUGIN.pack(parameters(metrics=[metric]))


class RejectsZero(keras.Model):
    """Accepts only ids from 1."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.embedding = keras.layers.Embedding(5, 3)

    def call(self, ids):
        if hasattr(ids, "numpy") and int(keras.ops.min(ids)) < 1:
            raise ValueError("ids begin with 1")
        return keras.ops.mean(self.embedding(keras.ops.cast(ids, "int32") - 1), axis=1)


IDS = schema(x=("feature", "int64", (2,), "array"), y=("label", "int64", (), "scalar"))


@pytest.mark.parametrize(
    ("kind", "message"), [("checked", "ids begin with 1"), ("embedding", "7 is not in|out of range")]
)
def test_models_that_reject_zeros_are_checked_with_real_rows(kind, message):
    if kind == "checked":
        model = RejectsZero()
        model(np.ones((1, 2), np.int64))
    else:
        ids = keras.Input((2,), dtype="int32")
        model = keras.Model(ids, keras.ops.mean(keras.layers.Embedding(5, 3)(7 - ids), axis=1))
    params = parameters(IDS, model=model)
    assert PLUGIN.check(params, IDS, None) in ([], [(3,)])
    assert PLUGIN.check(params, IDS, {"x": np.array([[3, 5]] * 5), "y": np.arange(5) % 3}) == [(3,)]
    with pytest.raises(ModelOutputError, match=message):
        PLUGIN.check(params, IDS, {"x": np.array([[0, 1]] * 5), "y": np.arange(5) % 3})


def plain_difference(labels, outputs):
    return (labels - outputs) ** 2


def test_double_labels_are_cast_like_in_model_fit():
    """The loss and the metric use the labels without a cast, which fails in TensorFlow for mixed dtypes."""
    data = schema(x=("feature", "float64", (6,), "array"), y=("label", "float64", (1,), "array"))
    model = keras.Sequential([network(), keras.layers.Dense(1)])
    model(np.zeros((1, 6)))
    params = parameters(data, model=model, loss=plain_difference, metrics=[plain_difference])
    assert PLUGIN.check(params, data, {"x": rows(5)["x"], "y": np.ones((5, 1))}) == [(1,)]


def test_several_losses_with_masks_are_not_accumulated():
    data = schema(
        x=("feature", "float64", (6,), "array"),
        y=("label", "int64", (), "scalar"),
        z=("label", "int64", (), "scalar"),
    )
    inputs = keras.Input((6,))
    model = keras.Model(inputs, [keras.layers.Dense(3, name="y")(inputs), keras.layers.Dense(3, name="z")(inputs)])
    losses = [keras.losses.SparseCategoricalCrossentropy(ignore_class=0) for _ in range(2)]
    params = parameters(data, model=model, loss=losses, metrics=None)
    assert PLUGIN.check(params, data, None) == [(3,), (3,)]
    with pytest.raises(
        ParamError, match=r"has a mask, and the model has several losses\. backward_passes_per_step > 1"
    ):
        PLUGIN.check({**params, "backward_passes_per_step": 2}, data, None)


def test_a_retired_parameter_accepts_none_as_its_default():
    KerasEstimator(shuffle_buffer_size=None, reader_pool_type=None)
    with pytest.raises(ParamError, match="reader_pool_type has no meaning"):
        KerasEstimator(reader_pool_type="thread")
