"""Callbacks: the broadcast, the averages of metrics, learning rates and the best model."""

from __future__ import annotations

import logging
from pathlib import Path

import keras
import numpy as np
import pytest

import sparkhvd.keras as hvd
from sparkhvd.errors import MismatchError
from tests.unit.keras.networks import fitted, network, rows


def start_from_the_same(folder):
    model = network(seed=hvd.rank())
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(1)
    fitted(model, keras.optimizers.Adam(0.0), slice(None), 16, callbacks=[broadcast])
    for mine, wanted in zip(model.get_weights(), network(seed=1).get_weights(), strict=True):
        assert np.array_equal(mine, wanted)


def outputs_of_layers_after_a_broadcast():
    """Adapt layers to different rows on every rank; return their outputs after a training and after a sync."""
    features, targets = rows()
    outputs = []
    for _ in range(2):
        layer = keras.layers.Normalization()
        layer.adapt(features + hvd.rank())
        model = keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(1)])
        if outputs:
            hvd.elastic.KerasState(model).sync()
        else:
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", jit_compile=False)
            model.fit(features, targets, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        outputs.append(keras.ops.convert_to_numpy(layer(features)))
    return outputs


def start_without_variables():
    """Broadcast a model whose first batch creates its variables and those of its optimizer."""
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    part = slice(hvd.rank(), None, 2)
    fitted(model, optimizer, part, 24, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    trained = [*model.trainable_variables, *optimizer.variables]
    return [keras.ops.convert_to_numpy(each) for each in trained]


def average_metrics():
    class Shown(keras.callbacks.Callback):
        logs = None

        def on_epoch_end(self, epoch, logs=None):
            self.logs = dict(logs)

    shown = Shown()
    of_classes = keras.ops.convert_to_tensor([1.0, 2.0 * hvd.rank()])  # as of F1Score(average=None)
    own = {"loss": float(hvd.rank()), "f1_score": of_classes, "accuracy": 1.0 - hvd.rank()}
    average = hvd.callbacks.MetricAverageCallback()
    average.on_epoch_end(0, own)
    assert own.pop("f1_score").tolist() == [1.0, 1.0]
    assert own == {"loss": 0.5, "accuracy": 0.5}
    model = network()
    part = slice(hvd.rank(), None, 2)
    fitted(model, keras.optimizers.SGD(0.0), part, 8, callbacks=[average, shown])
    features, targets = rows()
    whole = float(np.mean((model.predict(features, verbose=0) - targets) ** 2))
    assert abs(shown.logs["loss"] - whole) < 1e-4 * whole


def warm_up():
    class Rates(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.rates = []

        def on_train_batch_end(self, batch, logs=None):
            self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    seen = Rates()
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)
    decay = hvd.callbacks.LearningRateScheduleCallback(0.4, 0.1, start_epoch=2)
    fitted(network(), keras.optimizers.SGD(0.4), slice(None), 12, callbacks=[warmup, decay, seen])
    np.testing.assert_allclose(seen.rates[:8], 0.2 + 0.2 * np.arange(1, 9) / 8, rtol=1e-5)
    np.testing.assert_allclose(seen.rates[8:], 0.04, rtol=1e-5)


def keep_the_best(folder):
    path = Path(folder) / f"rank-{hvd.rank()}.keras"
    keep = hvd.callbacks.BestModelCheckpoint(str(path), monitor="loss")
    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    fitted(model, optimizer, slice(None), 16, callbacks=[hvd.callbacks.MetricAverageCallback(), keep])
    assert path.exists() == (hvd.rank() == 0), "only rank 0 writes"
    if hvd.rank() == 0:
        again = hvd.load_model(str(path), [keras.optimizers.Adam], {})
        assert "Exchanging" in str(type(again.optimizer).__mro__)
        plain = keras.saving.load_model(path)
        assert "Exchanging" not in str(type(plain.optimizer).__mro__), "a saved model must not need sparkhvd"
        assert int(plain.optimizer.iterations.numpy() if hasattr(plain.optimizer.iterations, "numpy") else 9) == 9


def warnings_of_training(wrap):
    """Return the warnings of a fit whose model is a copy of a compiled one."""
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    model = network()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse", jit_compile=False)
    cloned = keras.models.clone_model(model)
    if wrap:
        cloned.compile(hvd.DistributedOptimizer(cloned.optimizer), loss="mse", jit_compile=False)
    logging.getLogger("sparkhvd.keras.callbacks").addHandler(handler)
    features, targets = rows()
    cloned.fit(features, targets, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    logging.getLogger("sparkhvd.keras.callbacks").removeHandler(handler)
    return records


def test_the_broadcast_warns_if_a_copied_model_trains_apart(group):
    (message,), none = group.run(warnings_of_training, False)
    assert "does not exchange gradients, so every rank trains a model of its own. Wrap it" in message
    assert not none  # only rank 0 logs it
    assert group.run(warnings_of_training, True) == [[], []]


def test_all_ranks_start_from_the_root(group, tmp_path):
    group.run(start_from_the_same, str(tmp_path))


def test_ranks_normalize_rows_like_the_root_after_a_broadcast(group):
    for outputs in zip(*group.run(outputs_of_layers_after_a_broadcast), strict=True):
        np.testing.assert_array_equal(*outputs)


def test_ranks_agree_if_the_first_batch_builds_the_model(group):
    first, second = group.run(start_without_variables)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_metrics_are_averaged(group):
    group.run(average_metrics)


def test_the_learning_rate_warms_up_and_decays(group):
    group.run(warm_up)


def test_the_best_model_is_kept_by_one_rank_and_loads_anywhere(group, tmp_path):
    group.run(keep_the_best, str(tmp_path))


def train_with_dropout():
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", jit_compile=False)
    features, targets = rows()
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback()
    model.fit(features[:8], targets[:8], batch_size=4, shuffle=False, verbose=0, callbacks=[callback])
    (seed,) = (variable for variable in model.variables if "seed" in variable.path)
    return keras.ops.convert_to_numpy(seed).tolist(), model.get_weights()


def test_ranks_with_equal_weights_drop_different_units(group):
    (first, weights), (second, other_weights) = group.run(train_with_dropout)
    assert first != second
    for one, other in zip(weights, other_weights, strict=True):
        np.testing.assert_array_equal(one, other)


def rates_of_a_warmup(warmup, epochs, options):
    if keras.config.backend() == "torch":
        options = {}  # every batch is an execution
    model = network()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False, **options)
    callback = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=warmup)
    features, targets = rows()
    return model.fit(features[:40], targets[:40], batch_size=4, epochs=epochs, callbacks=[callback], verbose=0).history[
        "lr"
    ]


@pytest.mark.parametrize(
    ("warmup", "options"),
    [(0.5, {}), (1, {"steps_per_execution": 10}), (2, {"steps_per_execution": 5}), (1.5, {})],
    ids=["half an epoch", "one execution", "two executions", "one and a half"],
)
def test_a_warmup_ends_at_the_full_rate(group, warmup, options):
    for rates in group.run(rates_of_a_warmup, warmup, 3, options):
        assert max(rates) <= 0.1 + 1e-7
        assert rates[2] == pytest.approx(0.1)


def average_different_metrics():
    callback = hvd.callbacks.MetricAverageCallback()
    with pytest.raises(MismatchError) as caught:
        callback.on_epoch_end(0, {"loss": 1.0, ("acc", "mae")[hvd.rank()]: 2.0})
    logs = {"loss": float(hvd.rank())}
    callback.on_epoch_end(1, logs)
    return str(caught.value), logs


def test_metrics_of_different_names_are_not_averaged(group):
    message = "The ranks have different metrics: rank 0 has ['acc', 'loss'], rank 1 has ['loss', 'mae']."
    for text, logs in group.run(average_different_metrics):
        assert text.startswith(message)
        assert logs == {"loss": 0.5}
