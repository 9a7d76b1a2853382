from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import keras
import numpy as np
import pytest

import sparkhvd.keras as hvd
from sparkhvd.comm import session
from sparkhvd.data import ColumnSpec, DataSchema, columns
from sparkhvd.errors import ModelOutputError, ParamError
from sparkhvd.estimators.contradictions import check_watched
from sparkhvd.estimators.history import EpochRecord, averaged
from sparkhvd.estimators.keras import KerasEstimator, artifact
from sparkhvd.estimators.keras.names import check_names
from sparkhvd.estimators.keras.plugin import PLUGIN
from sparkhvd.estimators.policies import Checkpoints
from sparkhvd.keras.callbacks import BestModelCheckpoint
from sparkhvd.world import World
from tests.ranks import RankGroup
from tests.unit.estimators.arrays import ArraySource, Hooks, schema, spec

DATA = schema(x=("feature", "float64", (6,), "array"), y=("label", "int64", (), "scalar"))
WEIGHTED = schema(
    x=("feature", "float64", (6,), "array"), y=("label", "int64", (), "scalar"), w=("weight", "float64", (), "scalar")
)

# Rows of every rank in the steps of an epoch.
EVEN = [(4, 4)] * 10
PARTIAL_END = [(4, 4)] * 9 + [(2, 1)]
EMPTY_END = [(4, 4)] * 9 + [(1, 0)]
EMPTY_WITHIN = [(4, 4)] * 4 + [(8, 0)] + [(4, 4)] * 4 + [(0, 8)] + [(4, 4)]


@pytest.fixture(scope="module", params=["tensorflow", "torch"])
def group(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", request.param)
        started = RankGroup(2, imports=("keras", "sparkhvd.estimators.keras.trainer"))
    with started:
        yield started


def network():
    """The same weights in every backend, and a loss of the weights beside that of the rows."""
    decay = keras.regularizers.L2(0.01)
    layers = [
        keras.Input((6,)),
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.Dense(3, kernel_regularizer=decay),
    ]
    model = keras.Sequential(layers)
    random = np.random.default_rng(3)
    model.set_weights([random.normal(size=weight.shape) / 4 for weight in model.get_weights()])
    return model


def rows(count):
    random = np.random.default_rng(5)
    return {
        "x": random.normal(size=(count, 6)),
        "y": random.integers(0, 3, count),
        "w": random.uniform(0.1, 2.0, count),
    }


def source(sizes, rank, data=DATA):
    """The rows that ``rank`` has when rows are dealt out in order, step by step and rank by rank."""
    mine, start = [], 0
    for step in sizes:
        first = start + sum(step[:rank])
        mine.append(list(range(first, first + step[rank])))
        start += sum(step)
    found = {name: values for name, values in rows(start).items() if name in data.names()}
    return ArraySource(data, found, mine, [sum(step) for step in sizes])


def parameters(data=DATA, **more):
    base = {
        "model": network(),
        "optimizer": keras.optimizers.Adam(0.02),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "loss_weights": None,
        "metrics": ["accuracy"],
        "callbacks": None,
        "custom_objects": None,
        "input_shapes": None,
        "label_shapes": None,
        "schema": data,
    }
    return {**base, **more}


def train_as_rank(sizes, weighted, passes=1):
    data = WEIGHTED if weighted else DATA
    world = session.current().world
    how = spec(data, epochs=2, backward_passes_per_step=passes)
    trainer = PLUGIN.trainer(PLUGIN.pack(parameters(data)), how, world)
    hooks = Hooks()
    trainer.fit(source(sizes, world.rank, data), source(sizes, world.rank, data), hooks)
    ends = [*range(passes, len(sizes), passes), len(sizes)]
    assert [(report.epoch, report.step) for report in hooks.steps] == [(e, end) for e in range(2) for end in ends]
    assert int(keras.ops.convert_to_numpy(trainer._model.optimizer.iterations)) == 2 * len(ends)
    record = averaged(hooks.reports[-1], session.current())
    assert set(record.shares.values()) == {None}
    assert record.step_seconds > 0
    return trainer._model.get_weights(), record


def train_plainly(sizes, weighted, passes=1):
    """Plain Keras on the global batches; the weights, and the mean of the loss over the rows of the last epoch."""
    model = network()
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss=parameters()["loss"], metrics=["accuracy"])
    data = rows(sum(sum(step) for step in sizes))
    weights = data["w"] if weighted else None
    past = model.fit(data["x"], data["y"], 8 * passes, 2, sample_weight=weights, shuffle=False, verbose=0)
    last = {name: values[-1] for name, values in past.history.items()}
    return model.get_weights(), last, model.evaluate(data["x"], data["y"], verbose=0, return_dict=True)


@pytest.mark.parametrize(
    ("sizes", "weighted", "passes"),
    [
        *((sizes, weighted, 1) for sizes in (EVEN, PARTIAL_END, EMPTY_END) for weighted in (False, True)),
        (PARTIAL_END, False, 2),
        (EMPTY_END, True, 3),
        (EMPTY_WITHIN, False, 1),
    ],
)
def test_ranks_are_one_big_batch(group, sizes, weighted, passes):
    (mine, record), (other, _) = group.run(train_as_rank, sizes, weighted, passes)
    wanted, logs, evaluated = train_plainly(sizes, weighted, passes)
    for one, two, plain in zip(mine, other, wanted, strict=True):
        np.testing.assert_array_equal(one, two, "ranks must end with the same weights")
        assert np.linalg.norm(one - plain) <= 1e-4 * np.linalg.norm(plain)
    assert record.train["loss"] == pytest.approx(float(logs["loss"]), rel=1e-3)
    assert record.train["accuracy"] == pytest.approx(float(logs["accuracy"]), abs=1e-6)
    if not weighted:
        assert record.validation["loss"] == pytest.approx(evaluated["loss"], rel=1e-3)
        assert record.validation["accuracy"] == pytest.approx(evaluated["accuracy"], abs=1e-6)


def normalized_network(layer):
    start = network()
    model = keras.Sequential([keras.Input((6,)), *start.layers[:1], layer, *start.layers[1:]])
    model.set_weights([*start.get_weights()[:2], *layer.get_weights(), *start.get_weights()[2:]])
    return model


def train_with_normalization(sizes):
    """The weights, moving statistics included; nothing on a backend that does not have the layer."""
    if keras.config.backend() != "tensorflow":
        return None
    world, model = session.current().world, normalized_network(hvd.SyncBatchNormalization(momentum=0.8))
    packed = PLUGIN.pack(parameters(model=model, optimizer=keras.optimizers.SGD(0.1)))
    trainer = PLUGIN.trainer(packed, spec(DATA, epochs=2), world)
    trainer.fit(source(sizes, world.rank), source(sizes, world.rank), Hooks())
    return trainer._model.get_weights()


@pytest.mark.parametrize("sizes", [PARTIAL_END, EMPTY_END], ids=["partial end", "empty end"])
def test_batch_normalization_over_all_ranks_makes_them_one_big_batch(group, sizes):
    mine, other = group.run(train_with_normalization, sizes)
    if mine is None:
        return
    model = normalized_network(keras.layers.BatchNormalization(momentum=0.8))
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=parameters()["loss"])
    data = rows(sum(sum(step) for step in sizes))
    model.fit(data["x"], data["y"], 8, 2, shuffle=False, verbose=0)
    for one, two, plain in zip(mine, other, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two, "ranks must end with the same weights and statistics")
        assert np.linalg.norm(one - plain) <= 1e-4 * np.linalg.norm(plain)


def continue_from_state():
    """Two epochs in one go, and one epoch, then another by another trainer: the same."""
    world = session.current().world

    def trained(trainer, first, last):
        hooks = Hooks(first_epoch=first)
        trainer._spec = spec(DATA, epochs=last)
        trainer.fit(source(EVEN, world.rank), None, hooks)
        return trainer

    def make():
        return PLUGIN.trainer(PLUGIN.pack(parameters()), spec(DATA, epochs=2), world)

    undisturbed = trained(make(), 0, 2)
    state = trained(make(), 0, 1).state()
    resumed = make()
    resumed.restore(state)
    trained(resumed, 1, 2)
    for one, two in zip(undisturbed._model.get_weights(), resumed._model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_resumed_training_equals_an_undisturbed_one(group):
    group.run(continue_from_state)


def continue_within_an_epoch():
    """Three epochs in one go; and up to the middle of the second, then on from there by another trainer."""
    world = session.current().world

    def make():
        return PLUGIN.trainer(PLUGIN.pack(parameters()), spec(DATA, epochs=3), world)

    class Interrupted(Hooks):
        def on_step_end(self, report, trainer):
            if (report.epoch, report.step) == (1, 4):
                self.kept = trainer.state(), report.sums()
                raise InterruptedError

    undisturbed, whole = make(), Hooks()
    undisturbed.fit(source(PARTIAL_END, world.rank), None, whole)
    first, hooks = make(), Interrupted()
    with contextlib.suppress(InterruptedError):
        first.fit(source(PARTIAL_END, world.rank), None, hooks)
    resumed, again = make(), Hooks(first_epoch=1, first_step=4)
    resumed.restore(hooks.kept[0])
    resumed.fit(source(PARTIAL_END, world.rank), None, again)
    assert [(step.epoch, step.step, step.steps) for step in again.steps[:7]] == [
        *((1, step, 10) for step in range(5, 11)),
        (2, 1, 10),
    ]
    for one, two in zip(undisturbed._model.get_weights(), resumed._model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    (before, count), (after, rest) = hooks.kept[1]["loss"], again.reports[0].train["loss"]
    total, rows_of_all = whole.reports[1].train["loss"]
    assert count + rest == rows_of_all
    assert before + after == pytest.approx(total, rel=1e-4)


def test_going_on_within_an_epoch_equals_never_having_stopped(group):
    group.run(continue_within_an_epoch)


@dataclass
class StopAfter(keras.callbacks.Callback):
    epochs: int

    def __post_init__(self):
        super().__init__()

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch + 1 >= self.epochs


def stop_and_export(folder):
    world = session.current().world
    packed = PLUGIN.pack(parameters(callbacks=[StopAfter(1)]))
    trainer = PLUGIN.trainer(packed, spec(DATA, epochs=5, scale_lr=True), world)
    assert float(keras.ops.convert_to_numpy(trainer._model.optimizer.learning_rate)) == pytest.approx(0.04)
    hooks = Hooks()
    trainer.fit(source(EVEN, world.rank), None, hooks)
    assert len(hooks.reports) == 1, "the user's callback must end the training"
    own = Path(folder, str(world.rank))
    own.mkdir()
    trainer.export(own)
    model = artifact.load_model(own, compiled=True)
    assert float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)) == pytest.approx(0.02)
    batch = rows(5)
    (predicted,) = PLUGIN.predictor(own).predict({"x": batch["x"]})
    np.testing.assert_allclose(predicted, model.predict(batch["x"], verbose=0), rtol=1e-6)


def test_callbacks_run_and_the_model_is_exported(group, tmp_path):
    group.run(stop_and_export, str(tmp_path))


@dataclass
class Keeping(Hooks):
    kept: dict[str, bytes] = field(default_factory=dict)

    def keep_file(self, path):
        self.kept[path.name] = path.read_bytes()


def save_by_callback(save_best_only, history):
    """What was kept, and the weights in the end."""
    callback = keras.callbacks.ModelCheckpoint("some/where/{epoch}.keras", "loss", save_best_only=save_best_only)
    policy = Checkpoints(best="loss") if save_best_only else Checkpoints()
    packed = PLUGIN.pack(parameters(checkpoint_callback=callback))
    world = session.current().world
    trainer = PLUGIN.trainer(packed, spec(DATA, epochs=2, checkpoints=policy, scale_lr=True), world)
    hooks = Keeping(first_epoch=len(history), history=history)
    trainer.fit(source(PARTIAL_END, world.rank), None, hooks)
    assert float(keras.ops.convert_to_numpy(trainer._model.optimizer.learning_rate)) == pytest.approx(2 * 0.02)
    return hooks.kept, trainer._model.get_weights()


def test_rank_0_keeps_what_the_checkpoint_callback_saves(group, tmp_path):
    (kept, wanted), (by_another, _) = group.run(save_by_callback, True, ())
    assert (sorted(kept), by_another) == (["1.keras", "2.keras"], {})
    (tmp_path / "kept.keras").write_bytes(kept["2.keras"])
    model = keras.saving.load_model(tmp_path / "kept.keras")
    for one, other in zip(model.get_weights(), wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
    assert rate == pytest.approx(0.02), "whoever trains it further would scale it again"


def test_a_run_that_goes_on_knows_its_best_epoch(group):
    before = (EpochRecord(0, {"loss": 1e-9}),)
    assert [kept for kept, _ in group.run(save_by_callback, True, before)] == [{}, {}]
    assert [sorted(kept) for kept, _ in group.run(save_by_callback, False, before)] == [["2.keras"], []]


# On the driver.


def values_with(callback, **more):
    given = {"store": None, "loss": "mse", "feature_cols": ["x"], "label_cols": ["y"], **more}
    return KerasEstimator(model=network(), checkpoint_callback=callback, **given)._checked_values()


def test_the_trained_model_is_the_one_that_the_checkpoint_callback_wants():
    best = BestModelCheckpoint(monitor="val_accuracy")
    assert values_with(best, validation=0.1, metrics=["accuracy"])["checkpoints"] == Checkpoints(
        best="val_accuracy", mode="max"
    )
    best = BestModelCheckpoint(monitor="mae")
    assert values_with(best, metrics=[keras.metrics.MeanAbsoluteError(name="mae")])["checkpoints"].mode == "min"
    best = BestModelCheckpoint(monitor="mine", mode="max")
    assert values_with(best)["checkpoints"] == Checkpoints(best="mine", mode="max")


def test_a_checkpoint_callback_may_watch_the_validation_rows_of_files():
    values = values_with(BestModelCheckpoint())
    check_watched(values, held_out=True)
    with pytest.raises(ParamError, match="checkpoint_callback watches 'val_loss', but nothing is held out"):
        check_watched(values, held_out=False)


@pytest.mark.parametrize(
    ("callback", "more", "message"),
    [
        (keras.callbacks.EarlyStopping(), {}, "must be a keras.callbacks.ModelCheckpoint"),
        (BestModelCheckpoint(monitor="mine"), {}, "Give the callback mode='min' or mode='max'"),
        (BestModelCheckpoint(monitor="loss"), {"checkpoints": Checkpoints(best="mae")}, "leave one of them out"),
        (keras.callbacks.ModelCheckpoint("x.keras"), {}, "keeps its files in a Store, but none is given"),
        (
            keras.callbacks.ModelCheckpoint("x.keras", "loss", save_best_only=True, save_freq=3),
            {},
            "save_best_only=True and save_freq=3",
        ),
    ],
)
def test_a_checkpoint_callback_that_cannot_do_what_it_says_is_refused(callback, more, message):
    with pytest.raises(ParamError, match=message):
        values_with(callback, **more)


@keras.saving.register_keras_serializable("tests")
class Doubled(keras.layers.Layer):
    def call(self, values):
        return values * 2


def two_ended():
    first, second = keras.Input((2,), name="first"), keras.Input((1,), name="second")
    joined = keras.layers.Concatenate()([Doubled()(first), second])
    return keras.Model(
        {"first": first, "second": second},
        {"small": keras.layers.Dense(1, name="small")(joined), "large": keras.layers.Dense(3, name="large")(joined)},
    )


def train_on_vectors(sparse):
    """The weights after training on vectors half of whose elements are 0; "refused" where that cannot be."""
    vector = ColumnSpec("x", "float64", (6,), "feature", "vector", sparse=sparse, entries=6 if sparse else None)
    data = DataSchema((vector, DATA["y"]))
    made = source(PARTIAL_END, session.current().world.rank)
    dense = made.columns["x"] * (np.arange(6) % 2 == np.arange(len(made.columns["x"]))[:, None] % 2)
    if sparse:
        made.columns["x"] = columns.empty(vector, len(dense))
        made.columns["x"]["indices"] = np.where(dense != 0, np.arange(6), -1)
        made.columns["x"]["values"] = dense
    else:
        made.columns["x"] = dense
    on_tensorflow = keras.config.backend() == "tensorflow"
    model = keras.Sequential([keras.Input((6,), sparse=sparse and on_tensorflow), keras.layers.Dense(3)])
    model.set_weights([np.full(weight.shape, 0.1) for weight in model.get_weights()])
    try:
        payload = PLUGIN.pack(parameters(data, model=model))
    except ParamError as error:
        return str(error)
    trainer = PLUGIN.trainer(payload, spec(data, epochs=2), session.current().world)
    trainer.fit(ArraySource(data, made.columns, made.mine, made.everyones), None, Hooks())
    return trainer._model.get_weights()


def train_in_bfloat16(sizes):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = network()
    keras.config.set_dtype_policy(before)
    untrained = model.get_weights()
    world = session.current().world
    trainer = PLUGIN.trainer(PLUGIN.pack(parameters(model=model)), spec(DATA, epochs=2), world)
    trainer.fit(source(sizes, world.rank), None, Hooks())
    return untrained, trainer._model.get_weights()


def test_ranks_train_the_same_weights_in_bfloat16(group):
    (untrained, first), (_, second) = group.run(train_in_bfloat16, [(5, 3), (0, 7), (6, 1)])
    for before, one, other in zip(untrained, first, second, strict=True):
        assert one.dtype == np.float32
        assert np.array_equal(one, other)
        assert not np.allclose(one, before, atol=1e-3)


def test_sparse_columns_train_the_same_weights_on_tensorflow_and_are_refused_elsewhere(group):
    on_sparse, on_dense = (group.run(train_on_vectors, sparse)[0] for sparse in (True, False))
    if isinstance(on_sparse, str):
        assert "'x' is in sparse_cols; of Keras' backends only TensorFlow takes sparse tensors here" in on_sparse
        return
    for one, other in zip(on_sparse, on_dense, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_columns_are_matched_by_name_before_order():
    data = schema(
        second=("feature", "float32", (), "scalar"),
        first=("feature", "float32", (2,), "array"),
        large=("label", "int64", (), "scalar"),
        small=("label", "float32", (), "scalar"),
    )
    given = parameters(
        data,
        model=two_ended(),
        loss={"small": "mse", "large": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
        metrics=None,
    )
    assert sorted(PLUGIN.check(given, data, None)) == [(1,), (3,)]
    said = PLUGIN.mapping(given, data)
    assert "'first' is first as rows x [2]" in said
    assert "'large' is large" in said
    trainer = PLUGIN.trainer(PLUGIN.pack(given), spec(data), World(0, 1, 0, 1, 0, 1))
    assert "Doubled" in {type(layer).__name__ for layer in trainer._model.layers}


def fails(label, output):
    raise KeyError("my bug")


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
            "gradient_accumulation_steps=2 both gather",
        ),
        ({"loss": keras.losses.CategoricalCrossentropy()}, ModelOutputError, "The loss or a metric cannot compare"),
        (
            {"loss": "sparse_categorical_crossentopy"},
            ParamError,
            "(?s)loss: .* Did you mean 'sparse_categorical_crosse",
        ),
        ({"loss": {"y": ["no such thing"]}}, ParamError, "(?s)does not know 'no such thing'.*Give a name of keras"),
        ({"metrics": ["acuracy"]}, ParamError, "metrics: Keras does not know 'acuracy'. Did you mean 'accuracy'"),
        ({"optimizer": "adm"}, ParamError, "optimizer: Keras does not know 'adm'. Did you mean 'adam'"),
        (
            {"loss": fails},
            ModelOutputError,
            r"(?s)raised KeyError: 'my bug' \(line \d+ of test_keras_\w+.py, in fails: ",
        ),
        ({"optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())}, ParamError, "mixed_bfloat16"),
    ],
)
def test_what_cannot_work_is_refused_on_the_driver(changes, error, message):
    with pytest.raises(error, match=message):
        PLUGIN.check(parameters(**changes), DATA, None)


@pytest.mark.parametrize("optimizer", ["Adam", "sgd"])
@pytest.mark.parametrize("loss", ["ce", "CrossEntropy", "mse", {"class_name": "Huber", "config": {"name": "mine"}}])
@pytest.mark.parametrize("metrics", [["Acc", "mae"], ["sparse_categorical_accuracy", keras.metrics.Mean()], [fails]])
def test_names_that_keras_knows_pass(optimizer, loss, metrics):
    check_names(optimizer, {"y": loss}, metrics)


def test_what_compile_makes_of_a_loss_is_no_metric():
    with pytest.raises(ParamError, match="metrics: Keras does not know 'ce'"):
        check_names("sgd", "ce", ["ce"])
