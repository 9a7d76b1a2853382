"""Losses, masks, weights and metrics with Keras: two ranks compute the values of all their rows."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.errors import HorovodInternalError, ParamError
from sparkhvd.estimators.keras.losses.divisors import CurrentBatch, divide_over_ranks
from sparkhvd.estimators.keras.losses.metrics import create_metrics_before_training
from sparkhvd.estimators.keras.plugin import PLUGIN
from sparkhvd.estimators.keras.serialization import artifact
from sparkhvd.estimators.params.policies import metric_values
from sparkhvd.estimators.training.logs.history import average_over_ranks
from sparkhvd.tensorflow.tensors import own_failures
from tests.unit.estimators.arrays import ArraySource, Hooks, partition_rows, schema, spec
from tests.unit.estimators.keras.networks import (
    DATA,
    EMPTY_END,
    EMPTY_WITHIN,
    PARTIAL_END,
    SEQUENCES,
    TWO_LABELS,
    WEIGHTED,
    WEIGHTED_SEQUENCES,
    KeepingFiles,
    built,
    masked_network,
    network,
    normalized_with_two_outputs,
    parameters,
    raise_lost_rank,
    rows,
    rows_with_two_labels,
    sequences,
    source,
    two_losses,
)


def loss_ignoring_a_class():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)


def model_loss_and_rows(kind, count):
    """Return the model, its loss, the columns and the rows."""
    if kind == "masked":
        return masked_network(), "mse", SEQUENCES, sequences(count)
    if kind == "masked and weighted":
        return masked_network(), "mse", WEIGHTED_SEQUENCES, sequences(count)
    return network(), loss_ignoring_a_class(), WEIGHTED if kind == "weighted" else DATA, rows(count)


def train_with_ignored_values(kind, sizes, passes):
    model, loss, data, all_rows = model_loss_and_rows(kind, sum(map(sum, sizes)))
    params = parameters(data, model=model, loss=loss, optimizer=keras.optimizers.SGD(0.1), metrics=None)
    train_spec = spec(data, epochs=2, backward_passes_per_step=passes)
    trainer = PLUGIN.trainer(PLUGIN.pack(params), train_spec, session.current().world)
    own = partition_rows({name: all_rows[name] for name in data.names()}, sizes, session.current().world.rank, data)
    trainer.fit(own, own, hooks := Hooks())
    record = average_over_ranks(hooks.reports[-1], session.current())
    return trainer._model.get_weights(), record.train["loss"], record.validation["loss"]


@pytest.mark.parametrize(
    ("kind", "passes"),
    [
        *((kind, 1) for kind in ("ignored", "masked and weighted")),
        *(pytest.param(kind, 1, marks=pytest.mark.soak) for kind in ("weighted", "masked")),
        ("weighted", 2),
        ("masked", 3),
    ],
)
def test_losses_with_masks_divide_by_the_unmasked_values_of_a_step(group, kind, passes):
    """One rank has no rows in one step, and only masked rows in another; check training and validation."""
    sizes = [*PARTIAL_END[:3], (4, 4), (3, 1), (2, 0)]
    (mine, loss, validation), (other, _, _) = group.run(train_with_ignored_values, kind, sizes, passes)
    model, plain_loss, _, all_rows = model_loss_and_rows(kind, sum(map(sum, sizes)))
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=plain_loss)

    def weighted(part):
        """Return one weight per row; for sequences, in the shape that plain Keras applies to all time steps."""
        weights = {"weighted": all_rows.get("w"), "masked and weighted": all_rows["w"][:, None]}.get(kind)
        return None if weights is None else weights[part]

    def mean(step, batches):
        """Return the mean of the losses of steps of several batches, weighted by their rows."""
        counts = [sum(map(sum, sizes[first : first + batches])) for first in range(0, len(sizes), batches)]
        ends = np.cumsum(counts)
        parts = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        losses = [float(step(all_rows["x"][part], all_rows["y"][part], weighted(part))) for part in parts]
        return np.average(losses, weights=counts)

    trained = [mean(model.train_on_batch, passes) for _ in range(2)][-1]
    tested = mean(model.test_on_batch, 1)
    for one, two, plain in zip(mine, other, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, plain, rtol=1e-4, atol=1e-6)
    assert validation == pytest.approx(tested, rel=1e-4)
    if passes == 1:  # the reported loss is a mean of the batches' losses
        assert loss == pytest.approx(trained, rel=1e-4)


def test_several_losses_with_masks_are_not_accumulated():
    inputs = keras.Input((5,), dtype="int32")
    hidden = keras.layers.Embedding(4, 3, mask_zero=True)(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(1)(hidden), keras.layers.Dense(1)(hidden)])
    model.compile(optimizer="sgd", loss=["mse", "mae"], run_eagerly=True)
    divide_over_ranks(model, CurrentBatch(), accumulates=True)
    all_rows = sequences(4)
    with pytest.raises(ParamError, match=r"The loss 'mse' has a mask, and the model has several losses\."):
        model.train_on_batch(all_rows["x"], [all_rows["y"], all_rows["y"]])


CALLS: list[int] = []


def squares(labels, outputs):
    """Return one loss per value; this loss does not average over the outputs."""
    CALLS.append(1)
    return keras.ops.square(outputs - labels)


def train_with_a_loss_per_value(outputs):
    columns = {"x": ("feature", "float64", (2,), "array"), "y": ("label", "float64", (outputs,), "array")}
    data = schema(**columns, w=("weight", "float64", (), "scalar"))
    random, count = np.random.default_rng(4), 16
    all_rows = {
        "x": random.normal(size=(count, 2)),
        "y": random.normal(size=(count, outputs)),
        "w": random.uniform(size=count),
    }
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(outputs, kernel_initializer="zeros")])
    params = parameters(data, model=model, loss=squares, optimizer=keras.optimizers.SGD(0.1), metrics=None)
    trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(data, epochs=1), session.current().world)
    own = partition_rows(all_rows, [(4, 4), (4, 4)], session.current().world.rank, data)
    trainer.fit(own, None, Hooks())
    return trainer._model.get_weights(), all_rows


# With 4 outputs, the number of rows of a rank, a wrong alignment changes the weights; otherwise, it raises an error.
@pytest.mark.parametrize("outputs", [pytest.param(3, marks=pytest.mark.soak), 4])
def test_the_weight_of_a_row_applies_to_all_its_values_if_the_loss_does_not_average_them(group, outputs):
    (mine, all_rows), _ = group.run(train_with_a_loss_per_value, outputs)
    kernel, bias = np.zeros((2, outputs)), np.zeros(outputs)
    for part in (slice(0, 8), slice(8, 16)):
        x, y, w = (all_rows[name][part] for name in ("x", "y", "w"))
        slope = 2 * (x @ kernel + bias - y) * w[:, None] / y.size
        kernel, bias = kernel - 0.1 * x.T @ slope, bias - 0.1 * slope.sum(axis=0)
    np.testing.assert_allclose(mine[0], kernel, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(mine[1], bias, rtol=1e-4, atol=1e-6)


def count_calls_of_a_loss_for_sequences(weighted):
    model, loss = masked_network(), squares
    model.compile(optimizer="sgd", loss=loss, run_eagerly=True)
    divide_over_ranks(model, CurrentBatch())
    all_rows = sequences(4)
    model.train_on_batch(all_rows["x"], all_rows["y"])  # builds the loss
    CALLS.clear()
    model.train_on_batch(all_rows["x"], all_rows["y"], all_rows["w"] if weighted else None)
    return len(CALLS)


def test_weights_of_rows_cost_no_second_computation_of_the_loss():
    assert (
        count_calls_of_a_loss_for_sequences(weighted=True) == count_calls_of_a_loss_for_sequences(weighted=False) == 1
    )


def test_an_elastic_fit_can_recover_from_a_rank_that_is_lost_in_the_exchange_for_a_mask(monkeypatch):
    model, current = masked_network(), CurrentBatch()
    model.compile(optimizer="sgd", loss="mse")
    monkeypatch.setattr(current, "factor", raise_lost_rank)
    divide_over_ranks(model, current)
    all_rows = sequences(4)
    with pytest.raises(HorovodInternalError, match="rank 1 was lost"), own_failures():
        model.train_on_batch(all_rows["x"], all_rows["y"])


class RowsSoFar(keras.metrics.Metric):
    """Counts rows over all epochs: it is never reset."""

    def __init__(self, name="rows_so_far", **more):
        super().__init__(name=name, **more)
        self.count = self.add_variable(shape=(), initializer="zeros", name="count")

    def update_state(self, labels, outputs, sample_weight=None):
        self.count.assign_add(keras.ops.cast(keras.ops.shape(outputs)[0], "float32"))

    def reset_state(self):
        pass

    def result(self):
        return self.count * 1.0


def rows_counted_in_all_epochs():
    world = session.current().world
    trainer = PLUGIN.trainer(PLUGIN.pack(parameters(metrics=[RowsSoFar()])), spec(DATA, epochs=3), world)
    hooks = Hooks()
    sizes = [(4, 4)] * 3 + [(2, 1)]
    trainer.fit(source(sizes, world.rank), source([(3, 2)], world.rank), hooks)
    return [average_over_ranks(report, session.current()) for report in hooks.reports]


def test_a_metric_that_is_not_reset_counts_the_rows_of_all_ranks_once(group):
    """Each epoch has 27 training rows and 5 validation rows."""
    for records in group.run(rows_counted_in_all_epochs):
        assert [record.train["rows_so_far"] for record in records] == [27, 59, 91]
        assert [record.validation["rows_so_far"] for record in records] == [32, 64, 96]


class Largest(keras.metrics.Metric):
    """The largest output: a metric that is not a sum."""

    def __init__(self, name="largest", **settings):
        super().__init__(name=name, **settings)
        self.value = self.add_variable((), "zeros", aggregation="mean", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self):
        return self.value


def metrics_without_means():
    metrics = keras.metrics
    return [
        metrics.AUC(name="auc"),
        metrics.Precision(name="precision"),
        metrics.F1Score(threshold=0.5, name="f1"),  # an array with one element
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
    columns = rows(count)
    return {"x": columns["x"], "y": (columns["y"] + (columns["x"][:, 0] > 0) > 1).astype(np.int64)[:, None]}


def train_with_metrics_without_means(sizes):
    rank, count = session.current().world.rank, sum(map(sum, sizes))
    params = parameters(BINARY, model=two_classes(), loss="binary_crossentropy", metrics=metrics_without_means())
    trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(BINARY, epochs=2), session.current().world)
    hooks = Hooks()
    trainer.fit(*(partition_rows(two_class_rows(count), sizes, rank, BINARY) for _ in range(2)), hooks)
    return [average_over_ranks(report, session.current()) for report in hooks.reports]


@pytest.mark.parametrize(
    "sizes",
    [
        [*EMPTY_WITHIN, *[(7, 1)] * 3, (0, 3)],
        *(pytest.param(sizes, marks=pytest.mark.soak) for sizes in (PARTIAL_END, EMPTY_WITHIN)),
    ],
    ids=["all", "fewer rows at the end", "a rank without rows"],
)
def test_metrics_that_are_not_means_cover_all_rows(group, sizes):
    records, others = group.run(train_with_metrics_without_means, sizes)
    assert records[-1].train == others[-1].train
    model, data = two_classes(), two_class_rows(sum(map(sum, sizes)))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy", metrics=metrics_without_means())
    past = model.fit(**data, batch_size=8, epochs=2, validation_data=tuple(data.values()), shuffle=False, verbose=0)
    for epoch, record in enumerate(records):
        for sign, metrics in (("", record.train), ("val_", record.validation)):
            expected = {
                name: np.asarray(past.history[sign + name][epoch]).item() for name in metrics if name != "largest"
            }
            assert {name: value for name, value in metrics.items() if name != "largest"} == pytest.approx(
                expected, rel=1e-3
            )
            assert 0.5 < metrics["largest"] < float(past.history[f"{sign}largest"][epoch]) + 1e-6


def evaluate_two_losses(sizes):
    world, plain = session.current().world, source(sizes, session.current().world.rank, WEIGHTED)
    no_training = keras.optimizers.SGD(0.0)
    params = parameters(
        TWO_LABELS, model=normalized_with_two_outputs(), loss=two_losses(), optimizer=no_training, metrics=None
    )
    trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(TWO_LABELS, epochs=1), world)
    own = ArraySource(TWO_LABELS, rows_with_two_labels(plain.rows()), plain.mine, plain.everyones)
    trainer.fit(own, own, hooks := Hooks())
    record = average_over_ranks(hooks.reports[-1], session.current())
    names = ("sparse_categorical_crossentropy_loss", "mse_loss")
    return [[values[name] for name in names] for values in (record.train, record.validation)]


@pytest.mark.parametrize(
    "sizes",
    [
        [(4, 1), (4, 4), (5, 2), (3, 0)],
        *(pytest.param(sizes, marks=pytest.mark.soak) for sizes in ([(4, 1)], [(4, 4), (3, 0)])),
    ],
    ids=["all", "one step", "a rank without rows"],
)
def test_the_loss_of_every_output_is_a_mean_over_the_rows_of_all_ranks(group, sizes):
    (trained, tested), others = group.run(evaluate_two_losses, sizes)
    model, data = normalized_with_two_outputs(), rows_with_two_labels(sum(map(sum, sizes)))
    kinds, sums = model(data["x"])
    expected = [
        float((keras.ops.convert_to_numpy(losses).reshape(-1) * data["w"]).mean())
        for losses in (
            keras.losses.sparse_categorical_crossentropy(data["y"], kinds, from_logits=True),
            keras.losses.mean_squared_error(data["z"][:, None], sums),
        )
    ]
    assert trained == pytest.approx(expected, rel=1e-4)
    assert tested == pytest.approx(expected, rel=1e-4)
    assert others == [trained, tested]


class Ranking(keras.Model):
    """Reports a metric and a value that is not a metric."""

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
    params = parameters(model=built(Ranking), metrics=None, loss="mse", optimizer=keras.optimizers.SGD(0.1))
    trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(DATA), world)
    trainer.fit(source(sizes, world.rank), source(sizes, world.rank), hooks)
    record = average_over_ranks(hooks.reports[-1], session.current())
    return record.train["auc"], record.validation["auc"]


def test_metrics_cover_all_rows_even_beside_other_values_of_a_user_defined_step(group):
    sizes = [*PARTIAL_END, *EMPTY_END]
    model, data = built(Ranking), rows(sum(map(sum, sizes)))
    expected = keras.metrics.AUC()
    expected.update_state(np.minimum(data["y"], 1)[:, None], model(data["x"].astype(np.float32)))
    for reported in group.run(report_ranking, sizes):
        assert reported == pytest.approx([float(expected.result())] * 2, rel=1e-5)


class AddToLogs(keras.callbacks.Callback):
    """Adds values to the logs, one of them on rank 1 only."""

    def on_epoch_end(self, epoch, logs=None):
        logs |= {"epochs": np.int64(epoch + 1), "val_rank": session.current().world.rank, "text": "no number"}
        if session.current().world.rank == 1:
            logs["own"] = 7.0


def halved(epoch, rate):
    return rate / 2


def train_with_values_of_callbacks():
    """Return the metrics of each epoch, with the prefix of validation metrics."""
    world, hooks = session.current().world, Hooks()
    callbacks = [AddToLogs(), keras.callbacks.LearningRateScheduler(halved)]
    params = parameters(callbacks=callbacks, optimizer=keras.optimizers.SGD(0.5), metrics=None)
    trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(DATA, epochs=2), world)
    trainer.fit(source(PARTIAL_END, world.rank), source(EMPTY_END, world.rank), hooks)
    return [metric_values(average_over_ranks(report, session.current())) for report in hooks.reports]


def test_the_history_has_the_values_that_callbacks_add_to_the_logs(group):
    for first, second in group.run(train_with_values_of_callbacks):
        assert {"loss", "val_loss"} < first.keys() == second.keys()
        assert "text" not in first
        added = [{name: epoch[name] for name in sorted(epoch) if "loss" not in name} for epoch in (first, second)]
        common = {"own": 7.0, "val_rank": 0.5}
        assert added == [
            {"learning_rate": 0.25, "epochs": 1, **common},
            {"learning_rate": 0.125, "epochs": 2, **common},
        ]


class CountsRows(keras.layers.Layer):
    """Counts the training rows."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def call(self, values, training=False):
        if training:
            self.seen.assign_add(keras.ops.shape(values)[0])
        return values


class KeepsStateWithinEpoch(Hooks):
    """Keeps the state that a checkpoint within the epoch would contain."""

    def on_step_end(self, report, trainer):
        super().on_step_end(report, trainer)
        if report.step == 2:
            report.synchronize()
            self.within = trainer.state()


def train_with_own_statistics(sizes, folder):
    """Return the states within an epoch and at its end, and the validation losses in training and after export."""
    start, rank = network(), session.current().world.rank
    layers = [keras.layers.BatchNormalization(momentum=0.8), CountsRows()]
    model = keras.Sequential([keras.Input((6,)), *layers, *start.layers])
    saved = keras.callbacks.ModelCheckpoint("within.keras", save_freq=3)
    packed = PLUGIN.pack(parameters(model=model, optimizer="sgd", checkpoint_callback=saved))
    trainer = PLUGIN.trainer(packed, spec(DATA, epochs=2), session.current().world)
    train = source(sizes, rank)
    train.columns["x"] += 3 * rank  # the ranks' rows differ, like those of sorted files
    validation = source(sizes, rank)
    validation.columns["x"] = train.columns["x"]
    hooks = type("Kept", (KeepsStateWithinEpoch, KeepingFiles), {})()
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
    assert within == other_within, "a checkpoint within an epoch is the same on all ranks"
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_array_equal(one, other)
    mean, counted = weights[2], weights[4]
    assert 1.0 < mean.mean() < 2.0, "the mean is between the means of the ranks' rows, 0 and 3"
    assert counted == 2 * 23, "integers have the values of rank 0"
    assert saved is not None


def test_the_first_step_creates_the_metrics_of_a_network_whose_outputs_are_unknown():
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile(loss=loss_ignoring_a_class(), metrics=["accuracy"])
    create_metrics_before_training(model, ())
    assert not model._compile_metrics.built
