from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import keras
import numpy as np
import pytest

import sparkhvd.keras as hvd
from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.data import ColumnSpec, DataSchema
from sparkhvd.data.schema import columns
from sparkhvd.errors import ParamError
from sparkhvd.estimators.keras import artifact
from sparkhvd.estimators.keras.divisors import CurrentBatch, divide_over_ranks
from sparkhvd.estimators.keras.plugin import PLUGIN
from sparkhvd.estimators.params.policies import Checkpoints
from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.training.history import average_over_ranks
from tests.ranks import RankGroup
from tests.unit.estimators.arrays import ArraySource, Hooks, dealt, schema, spec
from tests.unit.estimators.keras.networks import DATA, WEIGHTED, network, parameters, rows, source

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
    record = average_over_ranks(hooks.reports[-1], session.current())
    assert sum(record.shares.values()) == pytest.approx(1)
    assert min(record.shares[kind] for kind in ("data_wait", "compute", "communication")) > 0
    assert record.step_seconds > 0
    return trainer._model.get_weights(), record


def train_plainly(sizes, weighted, passes=1):
    """Train plain Keras on the global batches; return the weights and the mean loss of the last epoch over the rows."""
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


def ignoring():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)


SEQUENCE_COLUMNS = {"x": ("feature", "int64", (5,), "array"), "y": ("label", "float64", (5, 1), "array")}
SEQUENCES = schema(**SEQUENCE_COLUMNS)
WEIGHTED_SEQUENCES = schema(**SEQUENCE_COLUMNS, w=("weight", "float64", (), "scalar"))


def masking():
    layers = [keras.layers.Embedding(4, 3, mask_zero=True), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
    random = np.random.default_rng(3)
    model.set_weights([random.normal(size=weight.shape) / 4 for weight in model.get_weights()])
    return model


def sequences(count):
    random = np.random.default_rng(2)
    made = {"x": random.integers(0, 4, (count, 5)), "y": random.normal(size=(count, 5, 1))}
    return {**made, "w": random.uniform(size=count)}


def parts_of(kind, count):
    """Return the model, its loss, the columns and the rows."""
    if kind == "masked":
        return masking(), "mse", SEQUENCES, sequences(count)
    if kind == "masked and weighted":
        return masking(), "mse", WEIGHTED_SEQUENCES, sequences(count)
    return network(), ignoring(), WEIGHTED if kind == "weighted" else DATA, rows(count)


def train_on_what_counts(kind, sizes):
    model, loss, data, made = parts_of(kind, sum(map(sum, sizes)))
    given = parameters(data, model=model, loss=loss, optimizer=keras.optimizers.SGD(0.1), metrics=None)
    trainer = PLUGIN.trainer(PLUGIN.pack(given), spec(data, epochs=2), session.current().world)
    own = dealt({name: made[name] for name in data.names()}, sizes, session.current().world.rank, data)
    trainer.fit(own, own, hooks := Hooks())
    record = average_over_ranks(hooks.reports[-1], session.current())
    return trainer._model.get_weights(), record.train["loss"], record.validation["loss"]


@pytest.mark.parametrize("kind", ["ignored", "weighted", "masked", "masked and weighted"])
def test_losses_with_masks_divide_by_the_unmasked_values_of_all_ranks(group, kind):
    """Check training and validation; one rank has no row in a step, and no unmasked row in another."""
    sizes = [*PARTIAL_END[:3], (4, 4), (3, 1), (2, 0)]
    (mine, loss, validation), (other, _, _) = group.run(train_on_what_counts, kind, sizes)
    model, plain_loss, _, made = parts_of(kind, sum(map(sum, sizes)))
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=plain_loss)

    def weighted(part):
        """Return one weight per row; for sequences in the shape that makes plain Keras use it for all time steps."""
        weights = {"weighted": made.get("w"), "masked and weighted": made["w"][:, None]}.get(kind)
        return None if weights is None else weights[part]

    def mean(step):
        """Return the mean of the batches' losses, weighted by their rows."""
        ends = np.cumsum([sum(size) for size in sizes])
        parts = [slice(end - sum(size), end) for end, size in zip(ends, sizes, strict=True)]
        losses = [float(step(made["x"][part], made["y"][part], weighted(part))) for part in parts]
        return sum(each * sum(size) for each, size in zip(losses, sizes, strict=True)) / ends[-1]

    trained = [mean(model.train_on_batch) for _ in range(2)][-1]
    tested = mean(model.test_on_batch)
    for one, two, plain in zip(mine, other, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, plain, rtol=1e-4, atol=1e-6)
    assert (loss, validation) == pytest.approx((trained, tested), rel=1e-4)


CALLS: list[int] = []


def squares(labels, outputs):
    """Return one loss per value; this loss does not average over the outputs."""
    CALLS.append(1)
    return keras.ops.square(outputs - labels)


def train_with_a_loss_per_value(outputs):
    columns = {"x": ("feature", "float64", (2,), "array"), "y": ("label", "float64", (outputs,), "array")}
    data = schema(**columns, w=("weight", "float64", (), "scalar"))
    random, count = np.random.default_rng(4), 16
    made = {
        "x": random.normal(size=(count, 2)),
        "y": random.normal(size=(count, outputs)),
        "w": random.uniform(size=count),
    }
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(outputs, kernel_initializer="zeros")])
    given = parameters(data, model=model, loss=squares, optimizer=keras.optimizers.SGD(0.1), metrics=None)
    trainer = PLUGIN.trainer(PLUGIN.pack(given), spec(data, epochs=1), session.current().world)
    own = dealt(made, [(4, 4), (4, 4)], session.current().world.rank, data)
    trainer.fit(own, None, Hooks())
    return trainer._model.get_weights(), made


@pytest.mark.parametrize("outputs", [3, 4])  # 4 is the number of rows of a rank, which would hide a wrong alignment
def test_the_weight_of_a_row_applies_to_all_its_values_if_the_loss_does_not_average_them(group, outputs):
    (mine, made), _ = group.run(train_with_a_loss_per_value, outputs)
    kernel, bias = np.zeros((2, outputs)), np.zeros(outputs)
    for part in (slice(0, 8), slice(8, 16)):
        x, y, w = (made[name][part] for name in ("x", "y", "w"))
        slope = 2 * (x @ kernel + bias - y) * w[:, None] / y.size
        kernel, bias = kernel - 0.1 * x.T @ slope, bias - 0.1 * slope.sum(axis=0)
    np.testing.assert_allclose(mine[0], kernel, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(mine[1], bias, rtol=1e-4, atol=1e-6)


def count_calls_of_a_loss_for_sequences(weighted):
    model, loss = masking(), squares
    model.compile(optimizer="sgd", loss=loss, run_eagerly=True)
    divide_over_ranks(model, CurrentBatch())
    made = sequences(4)
    model.train_on_batch(made["x"], made["y"])  # builds the loss
    CALLS.clear()
    model.train_on_batch(made["x"], made["y"], made["w"] if weighted else None)
    return len(CALLS)


def test_weights_of_rows_cost_no_second_computation_of_the_loss():
    assert (
        count_calls_of_a_loss_for_sequences(weighted=True) == count_calls_of_a_loss_for_sequences(weighted=False) == 1
    )


class Largest(keras.metrics.Metric):
    """The largest output, a metric that is not a sum."""

    def __init__(self, name="largest", **settings):
        super().__init__(name=name, **settings)
        self.value = self.add_variable((), "zeros", aggregation="mean", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self):
        return self.value


def no_means():
    metrics = keras.metrics
    return [
        metrics.AUC(name="auc"),
        metrics.Precision(name="precision"),
        metrics.F1Score("macro", 0.5, name="f1"),
        metrics.R2Score(name="r2"),
        metrics.BinaryIoU(name="iou"),
        Largest(),
    ]


BINARY = schema(x=("feature", "float64", (6,), "array"), y=("label", "int64", (1,), "array"))


def two_classes():
    model = keras.Sequential([*network().layers, keras.layers.Dense(1, activation="sigmoid")])
    model(np.zeros((1, 6), np.float32))
    model.layers[-1].set_weights([np.full((3, 1), 0.4), np.zeros(1)])
    return model


def two_class_rows(count):
    found = rows(count)
    return {"x": found["x"], "y": (found["y"] + (found["x"][:, 0] > 0) > 1).astype(np.int64)[:, None]}


def train_with_no_means(sizes):
    rank, count = session.current().world.rank, sum(map(sum, sizes))
    given = parameters(BINARY, model=two_classes(), loss="binary_crossentropy", metrics=no_means())
    trainer = PLUGIN.trainer(PLUGIN.pack(given), spec(BINARY, epochs=2), session.current().world)
    hooks = Hooks()
    trainer.fit(*(dealt(two_class_rows(count), sizes, rank, BINARY) for _ in range(2)), hooks)
    return [average_over_ranks(report, session.current()) for report in hooks.reports]


@pytest.mark.parametrize("sizes", [PARTIAL_END, EMPTY_WITHIN, [(7, 1)] * 9 + [(0, 3)]])
def test_metrics_that_are_not_means_cover_all_rows(group, sizes):
    records, others = group.run(train_with_no_means, sizes)
    assert records[-1].train == others[-1].train
    model, data = two_classes(), two_class_rows(sum(map(sum, sizes)))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy", metrics=no_means())
    past = model.fit(**data, batch_size=8, epochs=2, validation_data=tuple(data.values()), shuffle=False, verbose=0)
    for epoch, record in enumerate(records):
        for sign, found in (("", record.train), ("val_", record.validation)):
            wanted = {name: float(past.history[sign + name][epoch]) for name in found if name != "largest"}
            assert {name: value for name, value in found.items() if name != "largest"} == pytest.approx(
                wanted, rel=1e-3
            )
            assert 0.5 < found["largest"] < float(past.history[f"{sign}largest"][epoch]) + 1e-6


class Prepared(keras.Model):
    """A model with two outputs that preprocesses its columns."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.scale = keras.layers.Normalization()
        self.heads = [keras.layers.Dense(3, name="y"), keras.layers.Dense(1, name="z")]

    def call(self, values):
        scaled = self.scale(values)
        return tuple(head(scaled) for head in self.heads)


TWO_ENDED = DataSchema((*WEIGHTED.columns, ColumnSpec("z", "float64", (), "label", "scalar")))


def both():
    return [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"]


def prepared():
    model = Prepared()
    model.scale.adapt(2 * rows(50)["x"] + 1)
    model(np.zeros((1, 6), np.float32))
    random = np.random.default_rng(3)
    for head in model.heads:
        head.set_weights([random.normal(size=weight.shape) / 4 for weight in head.get_weights()])
    return model


def two_ended_rows(count):
    found = rows(count)
    return {**found, "z": found["x"].sum(axis=1)}


def train_two_ended(sizes):
    world, plain = session.current().world, source(sizes, session.current().world.rank, WEIGHTED)
    given = parameters(TWO_ENDED, model=prepared(), loss=both(), loss_weights=[1.0, 0.5], metrics=None)
    trainer = PLUGIN.trainer(PLUGIN.pack(given), spec(TWO_ENDED, epochs=2), world)
    train = ArraySource(TWO_ENDED, two_ended_rows(plain.rows()), plain.mine, plain.everyones)
    trainer.fit(train, None, Hooks())
    return [weight for head in trainer._model.heads for weight in head.get_weights()]


def test_a_subclass_with_a_preprocessing_layer_two_outputs_and_weights_is_one_big_batch_too(group):
    mine, other = group.run(train_two_ended, EMPTY_END)
    model, data = prepared(), two_ended_rows(sum(map(sum, EMPTY_END)))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss=both(), loss_weights=[1.0, 0.5])
    weights = (data["w"], data["w"])
    model.fit(data["x"], (data["y"], data["z"]), 8, 2, sample_weight=weights, shuffle=False, verbose=0)
    wanted = [weight for head in model.heads for weight in head.get_weights()]
    for one, two, plain in zip(mine, other, wanted, strict=True):
        np.testing.assert_array_equal(one, two)
        assert np.linalg.norm(one - plain) <= 1e-4 * np.linalg.norm(plain)


def evaluate_two_losses(sizes):
    world, plain = session.current().world, source(sizes, session.current().world.rank, WEIGHTED)
    still = keras.optimizers.SGD(0.0)
    given = parameters(TWO_ENDED, model=prepared(), loss=both(), optimizer=still, metrics=None)
    trainer = PLUGIN.trainer(PLUGIN.pack(given), spec(TWO_ENDED, epochs=1), world)
    own = ArraySource(TWO_ENDED, two_ended_rows(plain.rows()), plain.mine, plain.everyones)
    trainer.fit(own, own, hooks := Hooks())
    record = average_over_ranks(hooks.reports[-1], session.current())
    names = ("sparse_categorical_crossentropy_loss", "mse_loss")
    return [[values[name] for name in names] for values in (record.train, record.validation)]


@pytest.mark.parametrize("sizes", [[(4, 1)], [*PARTIAL_END[:2], (5, 2)], [(4, 4), (3, 0)]])
def test_the_loss_of_every_output_is_a_mean_over_the_rows_of_all_ranks(group, sizes):
    (trained, tested), others = group.run(evaluate_two_losses, sizes)
    model, data = prepared(), two_ended_rows(sum(map(sum, sizes)))
    kinds, sums = model(data["x"])
    wanted = [
        float((keras.ops.convert_to_numpy(losses).reshape(-1) * data["w"]).mean())
        for losses in (
            keras.losses.sparse_categorical_crossentropy(data["y"], kinds, from_logits=True),
            keras.losses.mean_squared_error(data["z"][:, None], sums),
        )
    ]
    assert trained == pytest.approx(wanted, rel=1e-4)
    assert tested == pytest.approx(wanted, rel=1e-4)
    assert others == [trained, tested]


def normalized_network(layer):
    start = network()
    model = keras.Sequential([keras.Input((6,)), *start.layers[:1], layer, *start.layers[1:]])
    model.set_weights([*start.get_weights()[:2], *layer.get_weights(), *start.get_weights()[2:]])
    return model


def train_with_normalization(sizes):
    """Return the weights and moving statistics; None on a backend without the layer."""
    if keras.config.backend() != "tensorflow":
        return None
    world, model = session.current().world, normalized_network(hvd.SyncBatchNormalization(momentum=0.8))
    packed = PLUGIN.pack(parameters(model=model, optimizer=keras.optimizers.SGD(0.1)))
    trainer = PLUGIN.trainer(packed, spec(DATA, epochs=2), world)
    trainer.fit(source(sizes, world.rank), source(sizes, world.rank), Hooks())
    return trainer._model.get_weights()


def gradients(model, batch, variables):
    """Return the gradients of a loss, by the tape of the backend."""
    features, labels = batch

    def loss():
        return keras.ops.mean(keras.ops.square(model(features) - keras.ops.cast(labels, "float32")[:, None]))

    if keras.config.backend() == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415

        with tf.GradientTape() as tape:
            value = loss()
        return value, tape.gradient(value, [variable.value for variable in variables])
    model.zero_grad()
    value = loss()
    value.backward()
    return value, [variable.value.grad for variable in variables]


class TwoOptimizers(keras.Model):
    """Applies the gradients of one optimizer twice per batch, and those of another one once."""

    def __init__(self, **more):
        super().__init__(**more)
        self.inner, self.outer = keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)
        self.other = self.another()

    @staticmethod
    def another():
        return hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))

    def call(self, values):
        return self.outer(self.inner(values))

    def train_step(self, data):
        for _ in range(2):
            _, found = gradients(self, data, self.inner.trainable_variables)
            self.optimizer.apply(found, self.inner.trainable_variables)
        loss, found = gradients(self, data, self.outer.trainable_variables)
        self.other.apply(found, self.outer.trainable_variables)
        return {"loss": loss}


class TwoPlainOptimizers(TwoOptimizers):
    @staticmethod
    def another():
        return keras.optimizers.SGD(0.05)


class Ranking(keras.Model):
    """Reports a metric beside a value of its own."""

    def __init__(self, **more):
        super().__init__(**more)
        self.outer, self.auc = keras.layers.Dense(1, activation="sigmoid"), keras.metrics.AUC(name="auc")

    def call(self, values):
        return self.outer(values)

    def report(self, data):
        features, labels = data
        self.auc.update_state(keras.ops.minimum(labels, 1)[:, None], self(features))
        return {"auc": self.auc.result(), "rows": keras.ops.shape(features)[0]}

    def train_step(self, data):
        return self.report(data)

    def test_step(self, data):
        return self.report(data)


def report_ranking(sizes):
    world, hooks = session.current().world, Hooks()
    given = parameters(model=built(Ranking), metrics=None, loss="mse", optimizer=keras.optimizers.SGD(0.1))
    trainer = PLUGIN.trainer(PLUGIN.pack(given), spec(DATA), world)
    trainer.fit(source(sizes, world.rank), source(sizes, world.rank), hooks)
    record = average_over_ranks(hooks.reports[-1], session.current())
    return record.train["auc"], record.validation["auc"]


@pytest.mark.parametrize("sizes", [PARTIAL_END, EMPTY_END], ids=["fewer rows at the end", "a rank without rows"])
def test_metrics_cover_all_rows_also_beside_other_values_of_a_user_defined_step(group, sizes):
    model, data = built(Ranking), rows(sum(map(sum, sizes)))
    wanted = keras.metrics.AUC()
    wanted.update_state(np.minimum(data["y"], 1)[:, None], model(data["x"].astype(np.float32)))
    for found in group.run(report_ranking, sizes):
        assert found == pytest.approx([float(wanted.result())] * 2, rel=1e-5)


def built(kind):
    model = kind()
    model(np.zeros((2, 6), np.float32))
    random = np.random.default_rng(3)
    model.set_weights([random.normal(size=weight.shape) / 4 for weight in model.get_weights()])
    return model


def train_with_two_optimizers(sizes):
    given = parameters(model=built(TwoOptimizers), optimizer=keras.optimizers.SGD(0.1), loss="mse", metrics=None)
    world = session.current().world
    trainer = PLUGIN.trainer(PLUGIN.pack(given), spec(DATA, epochs=2), world)
    trainer.fit(source(sizes, world.rank), None, Hooks())
    return trainer._model.get_weights()


@pytest.mark.parametrize("sizes", [PARTIAL_END, EMPTY_END], ids=["fewer rows at the end", "a rank without rows"])
def test_every_gradient_of_a_user_defined_step_is_weighted_by_the_rows_of_its_batch(group, sizes):
    model, data = built(TwoPlainOptimizers), rows(sum(map(sum, sizes)))
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", jit_compile=False)
    model.fit(data["x"].astype(np.float32), data["y"], 8, 2, shuffle=False, verbose=0)
    for found in group.run(train_with_two_optimizers, sizes):
        for one, other in zip(found, model.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


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


class Counting(keras.layers.Layer):
    """Counts the rows that it was trained on."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def call(self, values, training=False):
        if training:
            self.seen.assign_add(keras.ops.shape(values)[0])
        return values


class Equal(Hooks):
    """Keeps the model that a checkpoint within the epoch would contain."""

    def on_step_end(self, report, trainer):
        super().on_step_end(report, trainer)
        if report.step == 2:
            report.rank_state()
            self.within = trainer.state()


def train_with_own_statistics(sizes, folder):
    """Return the states within an epoch and at its end, and the validation losses in training and after export."""
    start, rank = network(), session.current().world.rank
    layers = [keras.layers.BatchNormalization(momentum=0.8), Counting()]
    model = keras.Sequential([keras.Input((6,)), *layers, *start.layers])
    saved = keras.callbacks.ModelCheckpoint("within.keras", save_freq=3)
    packed = PLUGIN.pack(parameters(model=model, optimizer="sgd", checkpoint_callback=saved))
    trainer = PLUGIN.trainer(packed, spec(DATA, epochs=2), session.current().world)
    train = source(sizes, rank)
    train.columns["x"] += 3 * rank  # the ranks' rows differ, as with sorted files
    validation = source(sizes, rank)
    validation.columns["x"] = train.columns["x"]
    hooks = type("Kept", (Equal, Keeping), {})()
    trainer.fit(train, validation, hooks)
    record = average_over_ranks(hooks.reports[-1], session.current())
    own = Path(folder, str(rank))
    own.mkdir()
    trainer.export(own)
    loaded, all_rows = artifact.load_model(own, compiled=True), [row for step in validation.mine for row in step]
    scores = loaded.evaluate(
        validation.columns["x"][all_rows], validation.columns["y"][all_rows], verbose=0, return_dict=True
    )
    losses = session.current().allreduce(np.array([scores["loss"] * len(all_rows), len(all_rows)]), ReduceOp.SUM)
    weights = [np.asarray(each) for each in loaded.get_weights()]
    return hooks.within, weights, record.validation["loss"], losses[0] / losses[1], hooks.kept.get("within.keras")


@pytest.mark.parametrize("sizes", [[(4, 4)] * 5 + [(3, 0)]])
def test_the_validation_loss_is_that_of_the_exported_model(group, sizes, tmp_path):
    """Every rank updates the moving statistics of BatchNormalization from its own rows."""
    (within, weights, loss, exported, saved), (other_within, others, _, _, _) = group.run(
        train_with_own_statistics, sizes, str(tmp_path)
    )
    assert loss == pytest.approx(exported, rel=1e-5)
    assert within == other_within, "a checkpoint within an epoch keeps what all ranks have"
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_array_equal(one, other)
    mean, counted = weights[2], weights[4]
    assert 1.0 < mean.mean() < 2.0, "the mean lies between those of the ranks' rows, 0 and 3"
    assert counted == 2 * 23, "integers are those of rank 0"
    assert saved is not None


class StopOn(keras.callbacks.Callback):
    """Stops the training within an epoch, on one rank."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 2 and session.current().world.rank == 1


class Together(Hooks):
    """Ends the training on all ranks when one rank stops, as an estimator's hooks do."""

    def on_epoch_end(self, report, trainer):
        return bool(session.current().allreduce(np.array([float(super().on_epoch_end(report, trainer))]))[0] == 1)


def stop_on_one_rank():
    packed = PLUGIN.pack(parameters(callbacks=[StopOn()]))
    trainer, hooks = PLUGIN.trainer(packed, spec(DATA, epochs=3), session.current().world), Together()
    trainer.fit(source(EVEN, session.current().world.rank), None, hooks)
    return len(hooks.steps)


def test_a_callback_that_stops_one_rank_within_an_epoch_ends_the_training_of_all_after_it(group):
    assert group.run(stop_on_one_rank) == [10, 10]


def averaging():
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7)


def train_averages(folder):
    trainer = PLUGIN.trainer(
        PLUGIN.pack(parameters(optimizer=averaging())), spec(DATA, epochs=2), session.current().world
    )
    trainer.fit(source(EVEN, session.current().world.rank), None, Hooks())
    trained, own = trainer._model.get_weights(), Path(folder, str(session.current().world.rank))
    own.mkdir()
    trainer.export(own)
    return trained, artifact.load_model(own, compiled=False).get_weights()


def test_the_exported_model_has_the_averages_of_its_weights_and_the_checkpoint_has_not(group, tmp_path):
    (trained, exported), _ = group.run(train_averages, str(tmp_path))
    model, data = network(), rows(80)
    model.compile(optimizer=averaging(), loss=parameters()["loss"])
    model.fit(data["x"], data["y"], 8, 2, shuffle=False, verbose=0)
    for raw, average, plain in zip(trained, exported, model.get_weights(), strict=True):
        np.testing.assert_allclose(average, plain, rtol=1e-4, atol=1e-6)
        assert not np.allclose(raw, plain, rtol=1e-3)


def continue_from_state():
    """Train two epochs at once, and with two trainers one after the other: the results are equal."""
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


def test_a_resumed_training_equals_an_uninterrupted_one(group):
    group.run(continue_from_state)


def dropping():
    first, *rest = network().layers
    return keras.Sequential([keras.Input((6,)), first, keras.layers.Dropout(0.5, seed=1), *rest])


def drawn():
    """Return the weights after a training with dropout, and the layer's output for ones."""
    world, model = session.current().world, dropping()
    trainer = PLUGIN.trainer(PLUGIN.pack(parameters(model=model)), spec(DATA), world)
    trainer.fit(source(PARTIAL_END, world.rank), None, Hooks())
    left = trainer._model.layers[1](np.ones((4, 16)), training=True)
    return trainer._model.get_weights(), keras.ops.convert_to_numpy(left)


def test_every_rank_draws_its_own_random_numbers(group):
    (weights, first), (others, second) = group.run(drawn)
    assert not np.array_equal(first, second)
    for mine, other in zip(weights, others, strict=True):
        np.testing.assert_array_equal(mine, other)


class Rates(keras.callbacks.Callback):
    """Records the learning rate of every batch."""

    def on_train_begin(self, logs=None):
        self.noted = getattr(self, "noted", [])

    def on_train_batch_end(self, batch, logs=None):
        self.noted.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


@dataclass
class Begun(ArraySource):
    """Delivers the rest of the second epoch as if other ranks had begun it."""

    def epoch(self, number, first_step=0):
        assert first_step == 0
        return super().epoch(number, 4 if number == 1 else 0)


def rates_within_an_epoch():
    """Return the rates of three epochs at once, and of the rest after other ranks did four batches of the second."""
    rank, found = session.current().world.rank, []
    for hooks in (Hooks(), Hooks(first_epoch=1, first_epoch_batches=6)):
        whole = source(EVEN, rank)
        rows_left = Begun(whole.schema, whole.columns, whole.mine, whole.everyones)
        callbacks = [hvd.callbacks.LearningRateWarmupCallback(0.02, warmup_epochs=3), Rates()]
        trainer = PLUGIN.trainer(
            PLUGIN.pack(parameters(callbacks=callbacks)), spec(DATA, epochs=3), session.current().world
        )
        trainer.fit(rows_left if hooks.first_epoch else whole, None, hooks)
        assert len(hooks.reports) == 3 - hooks.first_epoch
        found.append(trainer._package.callbacks[1].noted)
    return found


def test_the_learning_rate_continues_in_an_epoch_that_other_ranks_began(group):
    for whole, rest in group.run(rates_within_an_epoch):
        assert whole == sorted(set(whole)), "the rate rises with every batch"
        assert rest == pytest.approx(whole[14:])


def devices_by_torch():
    """Return the GPU that a rank uses of two, and the device of a transform; None on another backend."""
    if keras.config.backend() != "torch":
        return None
    import torch  # noqa: PLC0415
    from keras.src.backend.torch.core import get_device  # noqa: PLC0415

    from sparkhvd.estimators.keras import plugin, trainer  # noqa: PLC0415

    def place(gpu):
        with keras.device("meta"), plugin._device_scope(gpu)():
            return str(get_device())

    chosen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "set_device", chosen.append)
        trainer.prepare_devices(session.current().world)
        trainer.prepare_devices(session.current().world, use_gpu=False)
        return chosen, place(None), place(1), place(2)


def test_every_rank_has_its_own_gpu_and_a_transform_uses_the_gpu_that_spark_assigned(group):
    found = group.run(devices_by_torch)
    assert found in ([None, None], [([0], "cpu", "cuda:1", "cpu"), ([1], "cpu", "cuda:1", "cpu")])


def continue_within_an_epoch():
    """Train three epochs at once; and up to the middle of the second, resumed there by another trainer."""
    world = session.current().world

    def make():
        warmup = hvd.callbacks.LearningRateWarmupCallback(0.02, warmup_epochs=3)
        packed = PLUGIN.pack(parameters(model=dropping(), callbacks=[warmup]))
        return PLUGIN.trainer(packed, spec(DATA, epochs=3), world)

    class Interrupted(Hooks):
        def on_step_end(self, report, trainer):
            if (report.epoch, report.step) == (1, 4):
                state = session.current().broadcast(np.frombuffer(trainer.state(), np.uint8), 0)  # as the Store does
                self.kept = state.tobytes(), report.sums(), report.rank_state()
                raise InterruptedError

    undisturbed, whole = make(), Hooks()
    undisturbed.fit(source(PARTIAL_END, world.rank), None, whole)
    first, hooks = make(), Interrupted()
    with contextlib.suppress(InterruptedError):
        first.fit(source(PARTIAL_END, world.rank), None, hooks)
    resumed, again = make(), Hooks(first_epoch=1, first_step=4, rank_state=hooks.kept[2])
    resumed.restore(hooks.kept[0])
    resumed.fit(source(PARTIAL_END, world.rank), None, again)
    assert [(step.epoch, step.step, step.steps) for step in again.steps[:7]] == [
        *((1, step, 10) for step in range(5, 11)),
        (2, 1, 10),
    ]
    for one, two in zip(undisturbed._model.get_weights(), resumed._model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    parts = hooks.kept[1]["loss"], again.reports[0].train["loss"], whole.reports[1].train["loss"]
    (before, count), (after, rest), (total, rows_of_all) = session.current().allreduce(np.array(parts), ReduceOp.SUM)
    assert count + rest == rows_of_all
    assert before + after == pytest.approx(total, rel=1e-4)


def test_resuming_within_an_epoch_equals_an_uninterrupted_training(group):
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
    """Return the kept files, and the final weights."""
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
    assert rate == pytest.approx(0.02), "training it further would scale it again"


def test_a_resumed_run_knows_its_best_epoch(group):
    before = (EpochRecord(0, {"loss": 1e-9}),)
    assert [kept for kept, _ in group.run(save_by_callback, True, before)] == [{}, {}]
    assert [sorted(kept) for kept, _ in group.run(save_by_callback, False, before)] == [["2.keras"], []]


def train_on_vectors(sparse):
    """Return the weights after training on vectors with half of their elements 0, or the error if they are rejected."""
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


def test_sparse_columns_train_the_same_weights_on_tensorflow_and_are_rejected_elsewhere(group):
    on_sparse, on_dense = (group.run(train_on_vectors, sparse)[0] for sparse in (True, False))
    if isinstance(on_sparse, str):
        assert "'x' is in sparse_cols, but only Keras' TensorFlow backend takes sparse tensors here" in on_sparse
        return
    for one, other in zip(on_sparse, on_dense, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


TEXTS = schema(x=("feature", "str", (), "scalar"), y=("label", "int64", (), "scalar"))


class OfTexts(keras.Model):
    """A subclassed model without declared inputs, which learns from the numbers of words."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.lookup = keras.layers.StringLookup(vocabulary=["one", "two"])
        self.embedding = keras.layers.Embedding(3, 3, embeddings_initializer="ones")

    def call(self, words):
        return self.embedding(self.lookup(words)[:, 0])


def train_on_texts(sizes):
    """Return the weights after training on words, or the error if they are rejected."""
    count, rank = sum(map(sum, sizes)), session.current().world.rank
    model = OfTexts()
    if keras.config.backend() == "tensorflow":
        model(keras.ops.convert_to_tensor([["one"]]))
    else:
        model = network()
    made = {"x": np.array(["one", "two", "zwölf"], object)[np.arange(count) % 3], "y": np.arange(count) % 3}
    try:
        payload = PLUGIN.pack(parameters(TEXTS, model=model))
    except ParamError as error:
        return str(error)
    trainer = PLUGIN.trainer(payload, spec(TEXTS, epochs=2), session.current().world)
    trainer.fit(dealt(made, sizes, rank, TEXTS), None, Hooks())
    return trainer._model.get_weights()


def test_text_trains_a_subclass_on_tensorflow_and_is_rejected_elsewhere(group):
    """A rank may begin with no row at all."""
    found, other = group.run(train_on_texts, [(8, 0), *PARTIAL_END])
    if isinstance(found, str):
        assert "'x' holds text, but only Keras' TensorFlow backend has string tensors" in found
        return
    for one, two in zip(found, other, strict=True):
        np.testing.assert_array_equal(one, two)
    assert found[0].argmax(axis=1).tolist() == [2, 0, 1], "the place of each word's label"


class FromOne(keras.layers.Layer):
    """Rejects ids below 1."""

    def call(self, ids):
        if keras.config.backend() == "tensorflow":
            import tensorflow as tf  # noqa: PLC0415

            with tf.control_dependencies([tf.debugging.assert_greater_equal(ids, 1.0)]):
                return tf.identity(ids)
        assert float(ids.min()) >= 1
        return ids


def train_without_a_row(sizes):
    """A rank without rows uses a row of another rank as placeholder."""
    model, rank = keras.Sequential([keras.Input((6,)), FromOne(), *network().layers]), session.current().world.rank
    how = spec(DATA, epochs=1, sample={"x": np.ones((1, 6)), "y": np.zeros(1, np.int64)})
    trainer = PLUGIN.trainer(PLUGIN.pack(parameters(model=model)), how, session.current().world)
    train = source(sizes, rank)
    train.columns["x"] = np.abs(train.columns["x"]) + 1
    trainer.fit(train, train, Hooks())


def test_the_placeholder_of_a_rank_without_rows_is_valid_for_the_model(group):
    group.run(train_without_a_row, [(4, 0), (4, 0)])


class OwnStep(keras.Model):
    """A user-defined step that uses the labels without a cast."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.dense = keras.layers.Dense(1)

    def call(self, values):
        return self.dense(values)

    def test_step(self, *data):
        values, labels = data[-1]
        return {"loss": keras.ops.mean((labels - self(values)) ** 2)}


def train_on_doubles():
    data = schema(x=("feature", "float64", (6,), "array"), y=("label", "float64", (1,), "array"))
    model, made = OwnStep(), rows(8)
    model(np.zeros((1, 6), np.float32))
    given = parameters(data, model=model, loss="mse", metrics=None)
    trainer = PLUGIN.trainer(PLUGIN.pack(given), spec(data), session.current().world)
    columns = {"x": made["x"], "y": made["w"][:, None]}
    own = dealt(columns, [(4, 4)], session.current().world.rank, data)
    trainer.fit(own, own, hooks := Hooks())
    return hooks.reports[-1].validation["loss"][0]


def test_user_defined_steps_get_labels_with_the_dtype_of_model_fit(group):
    assert np.isfinite(group.run(train_on_doubles)).all()
