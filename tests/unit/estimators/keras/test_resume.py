"""Interrupted and resumed training with Keras, and callbacks that end the training or save the model."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import pytest

import sparkhvd.keras as hvd
from sparkhvd.comm import objects, session
from sparkhvd.estimators.keras.checkpoint.arrays import arrays_from_bytes, arrays_to_bytes
from sparkhvd.estimators.keras.plugin import PLUGIN
from sparkhvd.estimators.keras.serialization import artifact
from sparkhvd.estimators.params.policies import Checkpoints
from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.training.hooks import RunHooks
from tests.unit.estimators.arrays import ArraySource, Hooks, spec
from tests.unit.estimators.interruptions import (
    EveryStep,
    assert_equal_values,
    fits_with_and_without_loss,
    values_of_epochs,
)
from tests.unit.estimators.keras.networks import (
    DATA,
    EMPTY_WITHIN,
    EVEN,
    ON_TORCH,
    PARTIAL_END,
    KeepingFiles,
    TwoOptimizers,
    buffers,
    built,
    network,
    network_with_dropout,
    network_with_noise,
    parameters,
    raise_lost_rank,
    rows,
    source,
    with_moving_statistics,
)


class TwoWithMomentum(TwoOptimizers):
    @staticmethod
    def make_other_optimizer():
        return hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))


class StopOn(keras.callbacks.Callback):
    """Stops the training within an epoch, on one rank."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 2 and session.current().world.rank == 1


class EndTogether(Hooks):
    """Ends the training on all ranks when one rank stops, like an estimator's hooks."""

    def on_epoch_end(self, report, trainer):
        return bool(session.current().allreduce(np.array([float(super().on_epoch_end(report, trainer))]))[0] == 1)


def stop_on_one_rank():
    packed = PLUGIN.pack(parameters(callbacks=[StopOn()]))
    trainer, hooks = PLUGIN.trainer(packed, spec(DATA, epochs=3), session.current().world), EndTogether()
    trainer.fit(source(EVEN, session.current().world.rank), None, hooks)
    return len(hooks.steps)


def test_a_callback_that_stops_one_rank_within_an_epoch_ends_the_training_of_all_ranks_after_it(group):
    assert group.run(stop_on_one_rank) == [10, 10]


def sgd_with_averages():
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7)


def swap_averages():
    return keras.callbacks.SwapEMAWeights(swap_on_epoch=True)


class RandomRate(keras.callbacks.Callback):
    """Draws the learning rate of every batch."""

    def on_train_batch_begin(self, batch, logs=None):
        drawn = (np.random.uniform(), random.random(), np.random.normal())
        self.model.optimizer.learning_rate = 0.05 + 0.01 * sum(drawn)


def halved(epoch, rate):
    return rate / 2


def in_bfloat16():
    layers = [keras.layers.Dense(units, dtype="bfloat16") for units in (16, 3)]
    return keras.Sequential([keras.Input((6,)), *layers])


class RaiseLoss(keras.callbacks.Callback):
    """Raises the loss that other callbacks see, from the second epoch on."""

    def on_epoch_end(self, epoch, logs=None):
        logs["seen"] = logs["loss"] + 10 * (epoch > 0)


class FreezeAtFirst(keras.callbacks.Callback):
    """Freezes the first layer before the first step, from which TensorFlow traces its graph."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 0:
            self.model.layers[0].trainable = False


class Freeze(keras.callbacks.Callback):
    """Freezes the first layer after the first epoch; a graph of TensorFlow does not notice."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.layers[0].trainable = False


class FreezeAnew(Freeze):
    """Does the same, in a new graph."""

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.model.make_train_function(force=True)


class ChangeAtBegin(keras.callbacks.Callback):
    """Changes the weights, the learning rate and the trained layers when the training and its epochs begin."""

    def on_train_begin(self, logs=None):
        self.change()

    def on_epoch_begin(self, epoch, logs=None):
        self.change()
        self.model.layers[0].trainable = not self.model.layers[0].trainable

    def change(self):
        self.model.set_weights([weight * 0.9 for weight in self.model.get_weights()])
        optimizer = self.model.optimizer
        optimizer.learning_rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate)) * 0.9


class DecayInEpoch(keras.callbacks.Callback):
    """Lowers the learning rate with every batch of an epoch."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.05 * (1 - batch / self.params["steps"])


# Callbacks that monitor the raised loss act after the second of three epochs, or at the end of the training, because of
# the loss of the first epoch.
WATCHED = {"monitor": "seen", "mode": "min"}


def best_weights():
    return [RaiseLoss(), keras.callbacks.EarlyStopping(**WATCHED, patience=2, restore_best_weights=True)]


def train_averages(folder, make_callbacks):
    """Return the weights of the last epoch and of the exported model, also of runs that resume before and at the end.

    The last run has weights that no callback may change again.
    """
    rank, kept = session.current().world.rank, []

    class Keep(Hooks):
        def on_epoch_end(self, report, trainer):
            kept.append((trainer.state(), trainer._model.get_weights()))
            return super().on_epoch_end(report, trainer)

    def run(name, hooks, state=None):
        packed = PLUGIN.pack(parameters(optimizer=sgd_with_averages(), callbacks=make_callbacks()))
        trainer = PLUGIN.trainer(packed, spec(DATA, epochs=3), session.current().world)
        if state is not None:
            trainer.restore(state)
        trainer.fit(source(EVEN, rank), None, hooks)
        end = trainer.state()
        own = Path(folder, f"{name}-{rank}")
        own.mkdir()
        trainer.export(own)
        return end, artifact.load_model(own, compiled=False).get_weights()

    _, exported = run("whole", Keep())
    state, trained = kept[-1]
    end, resumed = run("resumed", Hooks(first_epoch=3), state)
    arrays = arrays_from_bytes(end) | {f"model.{i}": w * 2 for i, w in enumerate(exported)}
    _, unchanged = run("ended", Hooks(first_epoch=3), arrays_to_bytes(arrays))
    return trained, exported, resumed, [weight / 2 for weight in unchanged]


@pytest.mark.parametrize("make_callbacks", [list, best_weights])
def test_the_exported_model_equals_that_of_keras_even_if_the_training_was_interrupted_at_its_end(
    group, tmp_path, make_callbacks
):
    (trained, *exported), _ = group.run(train_averages, str(tmp_path), make_callbacks)
    model, data = network(), rows(80)
    model.compile(optimizer=sgd_with_averages(), loss=parameters()["loss"])
    model.fit(data["x"], data["y"], 8, 3, shuffle=False, verbose=0, callbacks=make_callbacks())
    for weights in exported:
        for raw, one, plain in zip(trained, weights, model.get_weights(), strict=True):
            np.testing.assert_allclose(one, plain, rtol=1e-4, atol=1e-6)
            assert not np.allclose(raw, plain, rtol=1e-3)


def warm_up():
    return [hvd.callbacks.LearningRateWarmupCallback(0.02, warmup_epochs=3)]


# Each kind joins states that do not depend on each other: losing one of them changes the weights.
KINDS = {
    "swapped averages": lambda: {"optimizer": sgd_with_averages(), "callbacks": [*warm_up(), swap_averages()]},
    "random rates and noise": lambda: {"model": network_with_noise(), "callbacks": [RandomRate()]},
    # The first checkpoint is between the batches of a step; the second one is after a step, because ranks continue with
    # the mean of their sums of gradients, which changes the rounding.
    "accumulated gradients and statistics": lambda: {
        "model": with_moving_statistics(),
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=7),
        "callbacks": warm_up(),
    },
    "frozen at first, decayed in epoch": lambda: {"callbacks": [FreezeAtFirst(), DecayInEpoch()]},
    "frozen, scheduled": lambda: {"callbacks": [Freeze(), keras.callbacks.LearningRateScheduler(halved)]},
    "frozen anew, plateau, bfloat16": lambda: {
        "model": in_bfloat16(),
        "callbacks": [
            FreezeAnew(),
            RaiseLoss(),
            keras.callbacks.ReduceLROnPlateau(**WATCHED, patience=1, factor=0.1),
        ],
    },
    "changed at begin, best weights": lambda: {"callbacks": [ChangeAtBegin(), *best_weights()]},
    "two optimizers": lambda: {
        "model": built(TwoWithMomentum),
        "optimizer": keras.optimizers.SGD(0.1),
        "loss": "mse",
        "metrics": None,
    },
}


class KeepFirstEpoch(Hooks):
    """Keeps the state of rank 0 at the end of the first epoch, like a Store."""

    def on_epoch_end(self, report, trainer):
        if report.epoch == 0:
            self.kept = objects.broadcast_object(session.current(), trainer.state(), name="state")
        return super().on_epoch_end(report, trainer)


class KeepWithinEpoch(Hooks):
    """Keeps the state of rank 0 in the second epoch, like a Store."""

    def on_step_end(self, report, trainer):
        super().on_step_end(report, trainer)
        if (report.epoch, report.step) == (1, 4):
            report.synchronize()
            own = report.rank_state()
            state = objects.broadcast_object(session.current(), trainer.state(), name="state")
            self.kept = state, tuple(objects.allgather_object(session.current(), report.metrics())), own


class KeepWeights(keras.callbacks.Callback):
    """Keeps the weights at the end of each epoch, before callbacks may replace them at the end of the training."""

    def on_train_begin(self, logs=None):
        self.kept = []

    def on_epoch_end(self, epoch, logs=None):
        self.kept.append([np.array(weight) for weight in self.model.get_weights()])


def resume_twice(kind):
    """Train three epochs, then the last two again from a checkpoint, and a part of these again from another one.

    The first checkpoint is at the end of an epoch; the second one is within an epoch, and taken after a resumption.
    """
    world = session.current().world

    def train(hooks, state=None):
        own = {"model": network_with_dropout(), **KINDS[kind]()}
        params = parameters(**{**own, "callbacks": [*own.get("callbacks", []), KeepWeights()]})
        trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(DATA, epochs=3), world)
        if state is not None:
            trainer.restore(state)
        trainer.fit(source(PARTIAL_END, world.rank), None, hooks)
        return trainer, hooks

    undisturbed, whole = train(KeepFirstEpoch())
    after_epoch, within = train(KeepWithinEpoch(first_epoch=1), whole.kept)
    state, metrics, own = within.kept
    within_epoch, rest = train(Hooks(first_epoch=1, first_step=4, rank_state=own, metrics=metrics), state)
    assert [(step.epoch, step.step, step.steps) for step in rest.steps[:7]] == [
        *((1, step, 10) for step in range(5, 11)),
        (2, 1, 10),
    ]
    for resumed in (after_epoch, within_epoch):
        assert_equal_models(undisturbed, resumed)
    resumed_means, means = (
        {name: total / rows for name, (total, rows) in report.train.items()}
        for report in (rest.reports[0], whole.reports[1])
    )
    assert resumed_means == pytest.approx(means, rel=1e-4)


def assert_equal_models(undisturbed, resumed):
    """Compare the final models, and their weights at the end of the last two epochs."""
    for one, two in zip(undisturbed._model.weights, resumed._model.weights, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(one), keras.ops.convert_to_numpy(two))
        assert one.trainable == two.trainable
    for one, two in zip(buffers(undisturbed._model), buffers(resumed._model), strict=True):
        np.testing.assert_array_equal(one, two)
    (_, *epochs), resumed_epochs = (trainer._package.callbacks[-1].kept for trainer in (undisturbed, resumed))
    for weights, resumed_weights in zip(epochs, resumed_epochs, strict=True):
        for one, two in zip(weights, resumed_weights, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_that_resumes_after_or_within_an_epoch_equals_an_uninterrupted_one(group, kind):
    group.run(resume_twice, kind)


def extend():
    """Train three epochs, and extend a run of one epoch to three: the results are equal."""
    world = session.current().world

    def trained(epochs, hooks, state=None):
        packed = PLUGIN.pack(parameters(optimizer=sgd_with_averages(), callbacks=[swap_averages()]))
        trainer = PLUGIN.trainer(packed, spec(DATA, epochs=epochs), world)
        if state is not None:
            trainer.restore(state)
        trainer.fit(source(EVEN, world.rank), None, hooks)
        return trainer

    trained(1, hooks := KeepFirstEpoch())
    extended, undisturbed = trained(3, Hooks(first_epoch=1), hooks.kept), trained(3, Hooks())
    for one, two in zip(undisturbed._model.get_weights(), extended._model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_training_extended_by_epochs_equals_one_that_had_them_from_the_start(group):
    group.run(extend)


def export_while_swapped(folder):
    """Train two epochs, export the first one as the best, and return its weights in the view of callbacks."""
    packed = PLUGIN.pack(parameters(optimizer=sgd_with_averages(), callbacks=[swap_averages()]))
    trainer = PLUGIN.trainer(packed, spec(DATA, epochs=2), session.current().world)
    kept = []

    class Keep(Hooks):
        def on_epoch_end(self, report, trainer):
            kept.append((trainer.state(), trainer._model.get_weights()))
            return super().on_epoch_end(report, trainer)

    trainer.fit(source(EVEN, session.current().world.rank), None, Keep())
    (state, seen), _ = kept
    trainer.restore(state)
    own = Path(folder, str(session.current().world.rank))
    own.mkdir()
    trainer.export(own)
    exported = artifact.load_model(own, compiled=True)
    averages = [keras.ops.convert_to_numpy(v) for v in exported.optimizer._model_variables_moving_average]
    return seen, exported.get_weights(), averages


def test_the_best_epoch_is_exported_with_the_averaged_weights_that_its_callbacks_saw(group, tmp_path):
    (seen, exported, averages), _ = group.run(export_while_swapped, str(tmp_path))
    for expected, one, two in zip(seen, exported, averages, strict=True):
        np.testing.assert_array_equal(one, expected)
        np.testing.assert_array_equal(two, expected)


class Rates(keras.callbacks.Callback):
    """Records the learning rate of every batch."""

    def on_train_begin(self, logs=None):
        self.recorded = getattr(self, "recorded", [])

    def on_train_batch_end(self, batch, logs=None):
        self.recorded.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


@dataclass
class RestOfSecondEpoch(ArraySource):
    """Delivers the rest of the second epoch, as if other ranks had begun it."""

    def epoch(self, number, first_step=0, stop=None):
        assert first_step == 0
        return super().epoch(number, 4 if number == 1 else 0)


def rates_within_an_epoch():
    """Return the rates of three epochs, and of their rest after other ranks did four batches of the second."""
    rank, rates = session.current().world.rank, []
    for hooks in (Hooks(), Hooks(first_epoch=1, first_epoch_batches=6)):
        whole = source(EVEN, rank)
        rows_left = RestOfSecondEpoch(whole.schema, whole.columns, whole.mine, whole.everyones)
        callbacks = [hvd.callbacks.LearningRateWarmupCallback(0.02, warmup_epochs=3), Rates()]
        trainer = PLUGIN.trainer(
            PLUGIN.pack(parameters(callbacks=callbacks)), spec(DATA, epochs=3), session.current().world
        )
        trainer.fit(rows_left if hooks.first_epoch else whole, None, hooks)
        assert len(hooks.reports) == 3 - hooks.first_epoch
        rates.append(trainer._package.callbacks[1].recorded)
    return rates


@ON_TORCH
def test_the_learning_rate_continues_in_an_epoch_that_other_ranks_began(group):
    for whole, rest in group.run(rates_within_an_epoch):
        assert whole == sorted(set(whole)), "the rate rises with every batch"
        assert rest == pytest.approx(whole[14:])


class Calls(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.recorded = []

    def on_train_begin(self, logs=None):
        self.recorded.append("begin")

    def on_epoch_begin(self, epoch, logs=None):
        self.batches = []

    def on_train_batch_begin(self, batch, logs=None):
        self.batches.append(batch)

    def on_epoch_end(self, epoch, logs=None):
        assert self.batches == [*range(self.batches[0], 10)]
        self.recorded.append((epoch, self.batches[0], self.params["steps"], self.params["epochs"]))

    def on_train_end(self, logs=None):
        self.recorded.append(sorted(logs))


def calls_within_an_epoch():
    """Return the calls of a callback in the rest of the second epoch and in the third."""
    whole = source(EVEN, session.current().world.rank)
    rows_left = RestOfSecondEpoch(whole.schema, whole.columns, whole.mine, whole.everyones)
    packed = PLUGIN.pack(parameters(callbacks=[Calls()]))
    trainer = PLUGIN.trainer(packed, spec(DATA, epochs=3), session.current().world)
    trainer.fit(rows_left, None, Hooks(first_epoch=1, first_epoch_batches=6))
    return trainer._package.callbacks[0].recorded


@ON_TORCH
def test_callbacks_see_one_training_although_it_resumes_within_an_epoch(group):
    for recorded in group.run(calls_within_an_epoch):
        assert recorded == ["begin", (1, 4, 10, 3), (2, 0, 10, 3), ["accuracy", "loss"]]


class Interrupted(KeepWithinEpoch):
    """Ends the training in the second epoch."""

    def on_step_end(self, report, trainer):
        super().on_step_end(report, trainer)
        if (report.epoch, report.step) == (1, 4):
            raise InterruptedError


class KeepCommit(RunHooks):
    """Keeps the commit after a step; ``position`` has its epoch and number."""

    kept = None

    def on_step_end(self, report, trainer):
        super().on_step_end(report, trainer)
        if (report.epoch, report.step) == self.position and self._commits is not None:
            self.kept = self._commits.checkpoint


def statistics_of_runs(kind, sizes, position):
    """Return the variables after a run without checkpoints, one with a commit in every step, and a resumed one.

    Also return the ranks' own statistics in the checkpoint from which the last run resumes.
    """
    world, train_spec = session.current().world, spec(DATA, epochs=2)
    accumulated = {"gradient_accumulation_steps": 2} if kind == "accumulated" else {}

    def trained(commits):
        optimizer = keras.optimizers.Adam(0.02, **accumulated)
        packed = PLUGIN.pack(parameters(model=with_moving_statistics(), optimizer=optimizer))
        trainer = PLUGIN.trainer(packed, train_spec, world)
        hooks = KeepCommit(None, "run", train_spec, session.current(), commits=commits)
        hooks.position = position
        if hooks.resume.checkpoint is not None:
            trainer.restore(hooks.resume.checkpoint.state)
        trainer.fit(source(sizes, world.rank), None, hooks)
        model = trainer._model
        values = [keras.ops.convert_to_numpy(v) for v in (*model.variables, *model.optimizer.variables)]
        return [*map(np.array, values), *buffers(model)], hooks.kept

    (without, _), (with_commits, checkpoint) = trained(None), trained(EveryStep())
    commits = EveryStep()
    commits.checkpoint = checkpoint
    resumed, _ = trained(commits)
    states = [arrays_from_bytes(state) for state in checkpoint.within.rank_states]
    own = [{name: value for name, value in state.items() if name.startswith("statistics.")} for state in states]
    return without, with_commits, resumed, own


@pytest.mark.parametrize("kind", ["plain", pytest.param("accumulated", marks=pytest.mark.soak)])
def test_moving_statistics_do_not_depend_on_checkpoints_within_an_epoch(group, kind):
    results = group.run(statistics_of_runs, kind, EMPTY_WITHIN, (1, 6))
    for without, with_commits, resumed, (first, second) in results:
        for one, two, three in zip(without, with_commits, resumed, strict=True):
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(one, three)
        assert any(not np.array_equal(first[name], second[name]) for name in first), "each rank has its own"


class AddFallingValue(keras.callbacks.Callback):
    """Adds a value to the logs of batches, which is lowest in the first epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        logs["falling"] = -batch - 10 * (self.epoch == 0)


def saved_files(folder):
    """Return the files that ModelCheckpoints save in a training, in one that is interrupted, and in the rest of it."""
    rank = session.current().world.rank

    def run(name, hooks, state=None):
        own = Path(folder, f"{name}-{rank}")
        own.mkdir()
        best = {"save_best_only": True, "save_weights_only": True, **WATCHED}
        callbacks = [
            RaiseLoss(),
            AddFallingValue(),
            keras.callbacks.ModelCheckpoint(own / "{epoch}-best.weights.h5", **best),
            keras.callbacks.ModelCheckpoint(own / "{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=4),
            keras.callbacks.ModelCheckpoint(
                own / "{epoch}-{batch}-best.weights.h5", **{**best, "monitor": "falling"}, save_freq=6
            ),
            hvd.callbacks.BestModelCheckpoint(str(own / "{epoch}.keras"), **WATCHED),
        ]
        trainer = PLUGIN.trainer(
            PLUGIN.pack(parameters(callbacks=callbacks)), spec(DATA, epochs=3), session.current().world
        )
        if state is not None:
            trainer.restore(state)
        with contextlib.suppress(InterruptedError):
            trainer.fit(source(EVEN, rank), None, hooks)
        return sorted(path.name for path in own.iterdir())

    whole, first = run("whole", Hooks()), run("first", hooks := Interrupted())
    state, _, own = hooks.kept
    return whole, first, run("rest", Hooks(first_epoch=1, first_step=4, rank_state=own), state)


@ON_TORCH
def test_the_checkpoints_that_callbacks_save_do_not_depend_on_an_interruption(group, tmp_path):
    for rank, (whole, first, rest) in enumerate(group.run(saved_files, str(tmp_path))):
        assert whole == sorted([*first, *rest])
        assert first == [
            "1-4.weights.h5",
            "1-6-best.weights.h5",
            "1-8.weights.h5",
            "1-best.weights.h5",
            *(["1.keras"] if rank == 0 else []),
            "2-2.weights.h5",
        ]


class Halving(keras.Model):
    """Reports its metrics, and a value that no metric computes."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.network = network()

    def call(self, values):
        return self.network(values)

    def train_step(self, *data):
        logs = super().train_step(*data)
        return {**logs, "half": logs["accuracy"] / 2}


def train_with_metrics(kind, sizes, interruptions):
    world = session.current().world
    train_spec = spec(DATA, epochs=2)

    def make():
        if kind == "own step":
            model, metrics = built(Halving), ["accuracy"]
        else:
            model, metrics = network(), ["accuracy", keras.metrics.MeanIoU(3, "iou", sparse_y_pred=False)]
        return PLUGIN.trainer(PLUGIN.pack(parameters(model=model, metrics=metrics)), train_spec, world)

    return values_of_epochs(make, source(sizes, world.rank), train_spec, interruptions)


@ON_TORCH
@pytest.mark.parametrize("kind", ["own step", "sums"])
@pytest.mark.parametrize(
    ("sizes", "interruptions"),
    [
        pytest.param(PARTIAL_END, [(0, 2)], marks=pytest.mark.soak, id="once"),
        pytest.param(EMPTY_WITHIN, [(1, 5), (1, 10)], id="twice in an epoch and after empty steps"),
        pytest.param(EMPTY_WITHIN, [(1, 3), (1, 5), (1, 10)], marks=pytest.mark.soak, id="three times in an epoch"),
    ],
)
def test_the_metrics_of_an_interrupted_epoch_are_over_all_of_its_rows(group, kind, sizes, interruptions):
    for undisturbed, resumed in group.run(train_with_metrics, kind, sizes, interruptions):
        assert_equal_values(undisturbed, resumed, rel=1e-5)


def fail_once(*_, **__):
    vars(session.current()).pop("allreduce_async")
    raise_lost_rank()


class LoseRank(keras.callbacks.Callback):
    """Loses a rank in the sixth step of the second epoch."""

    def __init__(self, moment):
        super().__init__()
        self.moment = moment

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch, self.moment) == (1, 4, "in the step"):
            if keras.config.backend() == "torch":
                object.__setattr__(self.model.optimizer, "_exchange", raise_lost_rank)
            else:  # the graph calls this method in every step
                session.current().allreduce_async = fail_once
        if (self.epoch, batch, self.moment) == (1, 5, "after the update"):
            raise_lost_rank()


class ShrinkingLayer(keras.layers.Dense):
    """Changes its weights in the forward pass."""

    def call(self, values):
        self.kernel.assign(0.99 * self.kernel)
        return super().call(values)


def shrinking_network():
    return keras.Sequential([keras.Input((6,)), ShrinkingLayer(3)])


def shrink_kernel(values):
    """Changes a weight of the model in the forward pass, as the function of a layer that has no variables."""
    kernel = getattr(session.current(), "shrinking_kernel", None)  # None while the model is built
    if kernel is not None:
        kernel.assign(0.99 * kernel)
    return values


def network_with_shrinking_lambda():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), keras.layers.Lambda(shrink_kernel)])


LOSSES = {
    "statistics": with_moving_statistics,
    "weights": shrinking_network,
    "weights in a Lambda": network_with_shrinking_lambda,
}
CUSTOM_OBJECTS = {"ShrinkingLayer": ShrinkingLayer, "shrink_kernel": shrink_kernel}


def lose_rank(kind, moment):
    """Return what the survivors of a loss resume with; None if they return to their last commit."""
    world = session.current().world
    how = spec(DATA, epochs=2, elastic=True)

    def make(loses):
        warmup = hvd.callbacks.LearningRateWarmupCallback(0.02, warmup_epochs=3)  # changes the rate before every step
        params = {"model": LOSSES.get(kind, network)(), "callbacks": [warmup, LoseRank(moment if loses else "")]}
        params |= {"custom_objects": CUSTOM_OBJECTS} if kind.startswith("weights") else {}
        trainer = PLUGIN.trainer(PLUGIN.pack(parameters(**params)), how, world)
        session.current().shrinking_kernel = trainer._model.layers[0].kernel if "Lambda" in kind else None
        return trainer

    fits = fits_with_and_without_loss(make, source(PARTIAL_END, world.rank), how)
    if fits is None:
        return None
    position, *trained = fits
    return position, *((trainer._model.get_weights(), values) for trainer, values in trained)


def test_survivors_of_a_lost_rank_resume_from_the_last_complete_step(group):
    for position, (weights, values), (resumed_weights, resumed_values) in group.run(lose_rank, "", "in the step"):
        assert position == (1, 5)
        for one, two in zip(weights, resumed_weights, strict=True):
            np.testing.assert_array_equal(one, two)
        assert_equal_values(values, resumed_values, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        ("", "after the update"),
        ("statistics", "in the step"),
        ("weights", "in the step"),
        ("weights in a Lambda", "in the step"),
    ],
)
def test_survivors_return_to_the_last_commit_if_they_lack_the_state_of_the_last_step(group, kind, moment):
    assert group.run(lose_rank, kind, moment) == [None, None]


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


def save_by_callback(save_best_only, history):
    """Return the kept files, and the final weights."""
    callback = keras.callbacks.ModelCheckpoint("some/where/{epoch}.keras", "loss", save_best_only=save_best_only)
    policy = Checkpoints(best="loss") if save_best_only else Checkpoints()
    packed = PLUGIN.pack(parameters(checkpoint_callback=callback))
    world = session.current().world
    trainer = PLUGIN.trainer(packed, spec(DATA, epochs=2, checkpoints=policy, scale_lr=True), world)
    hooks = KeepingFiles(first_epoch=len(history), history=history)
    trainer.fit(source(PARTIAL_END, world.rank), None, hooks)
    assert float(keras.ops.convert_to_numpy(trainer._model.optimizer.learning_rate)) == pytest.approx(2 * 0.02)
    return hooks.kept, trainer._model.get_weights()


def test_rank_0_keeps_what_the_checkpoint_callback_saves(group, tmp_path):
    (kept, expected), (by_another, _) = group.run(save_by_callback, True, ())
    assert (sorted(kept), by_another) == (["1.keras", "2.keras"], {})
    (tmp_path / "kept.keras").write_bytes(kept["2.keras"])
    model = keras.saving.load_model(tmp_path / "kept.keras")
    for one, other in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
    assert rate == pytest.approx(0.02), "a continued training would scale the rate again"


@ON_TORCH
def test_a_resumed_run_knows_its_best_epoch(group):
    before = (EpochRecord(0, {"loss": 1e-9}),)
    assert [kept for kept, _ in group.run(save_by_callback, True, before)] == [{}, {}]
    assert [sorted(kept) for kept, _ in group.run(save_by_callback, False, before)] == [["2.keras"], []]


class StopAtBatch(keras.callbacks.Callback):
    """Stops the training on one rank, at one batch of the second epoch."""

    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch, session.current().world.rank) == (1, 1, 1):
            self.model.stop_training = True


def train_until_a_callback_stops(interruptions):
    world, train_spec = session.current().world, spec(DATA, epochs=4)
    packed = PLUGIN.pack(parameters(callbacks=[StopAtBatch()]))
    return values_of_epochs(
        lambda: PLUGIN.trainer(packed, train_spec, world), source(EVEN, world.rank), train_spec, interruptions
    )


def test_a_stop_that_a_callback_requested_before_interruptions_ends_the_resumed_training(group):
    """The first interruption is at once after the request, the second one is later in the same epoch."""
    for undisturbed, resumed in group.run(train_until_a_callback_stops, [(1, 2), (1, 4)]):
        assert_equal_values(undisturbed, resumed, rel=1e-5)
