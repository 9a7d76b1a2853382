from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import sparkhvd.tensorflow as hvd
from tests.ranks import RankGroup


@pytest.fixture(scope="module")
def three_ranks():
    with RankGroup(3, imports=("tensorflow", "sparkhvd.tensorflow")) as started:
        yield started


VARIANTS = {
    "plain": ({}, False),
    "masked": ({}, True),
    "channels first": ({"axis": 1, "scale": False}, False),
    "renormalized": ({"renorm": True, "renorm_clipping": {"rmin": 0.3, "rmax": 3.0, "dmax": 5.0}}, False),
}


def rows(channels_first=False):
    """Return images whose means are much larger than their deviations, targets, and a mask of pixels."""
    random = np.random.default_rng(1)
    images = random.normal(size=(9, 4, 3, 2)) * [1.0, 3.0] + [100.0, -5.0]
    included = random.uniform(size=(9, 4, 3)) < 0.7
    targets = random.normal(size=(9, 1))
    return (images.transpose(0, 3, 1, 2) if channels_first else images), targets, included


def rows_of_rank(uneven):
    """Return the slice of the rows of this rank; rank 0 has one row or none, and the last rank has the most rows."""
    size, rank = hvd.size(), hvd.rank()
    starts = {(2, 1): [0, 1, 9], (3, 1): [0, 1, 3, 9], (2, 0): [0, 0, 9], (3, 0): [0, 0, 4, 9]}[size, uneven]
    return slice(starts[rank], starts[rank + 1])


class Network(keras.Model):
    """A network with trained layers before and after the normalization."""

    def __init__(self, layer, masked):
        super().__init__(dtype="float64")
        mixing = keras.initializers.Constant([[1.0, 0.0], [0.5, 1.0]])
        equation, shape = ("bcxy,ck->bkxy", [2, None, None]) if layer.axis == 1 else ("bxyc,ck->bxyk", [None, None, 2])
        self.before = keras.layers.EinsumDense(equation, shape, dtype="float64", kernel_initializer=mixing)
        self.normal = layer
        self.after = keras.layers.Dense(1, dtype="float64", kernel_initializer=keras.initializers.RandomNormal(seed=1))
        self.masked = masked

    def build(self, images_shape, included_shape):
        pass  # the first call builds the layers

    def call(self, images, included, training=True):
        outputs = self.before(images)
        outputs = self.normal(outputs, training=training, mask=included if self.masked else None)
        return self.after(tf.reshape(tf.square(outputs) + outputs, [-1, 24]))


def trained(layer, mine, wrap, masked, in_graph):
    """Return the network after three steps; losses are sums over rows, so that any partition gives equal results."""
    images, targets, included = rows(layer.axis == 1)
    network = Network(layer, masked)
    network(images[:1], included[:1], training=False)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((network(images[mine], included[mine]) - targets[mine]) ** 2) / len(targets)
        gradients = wrap(tape).gradient(loss, network.trainable_variables)
        for variable, gradient in zip(network.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.01 * gradient)

    run = tf.function(step, autograph=False) if in_graph else step
    for _ in range(3):
        run()
    return network


def compare(uneven, variant, in_graph):
    """Compare all ranks, which use our layer, with one process that has all rows and uses Keras' layer."""
    options, masked = {"dtype": "float64"} | VARIANTS[variant][0], VARIANTS[variant][1]
    tolerance = 1e-5 if masked else 1e-8  # Keras adds 1e-7 to the number of unmasked rows
    start = Network(keras.layers.BatchNormalization(**options), masked)
    alone = trained(keras.layers.BatchNormalization(**options), slice(None), lambda tape: tape, masked, in_graph)
    sums = lambda tape: hvd.DistributedGradientTape(tape, op=hvd.Sum)  # noqa: E731
    together = trained(hvd.SyncBatchNormalization(**options), rows_of_rank(uneven), sums, masked, in_graph)
    start(rows(options.get("axis") == 1)[0][:1], rows()[2][:1], training=False)
    for initial, weights, synchronized in zip(
        start.get_weights(), alone.get_weights(), together.get_weights(), strict=True
    ):
        assert np.isfinite(weights).all()
        assert np.linalg.norm(weights - synchronized) <= tolerance * np.linalg.norm(weights - initial) + 1e-10, (
            initial,
            weights,
            synchronized,
        )
    assert np.linalg.norm(alone.normal.moving_mean) > 1, "the statistics must have changed"
    statistics = [variable.numpy().tobytes() for variable in together.normal.non_trainable_variables]
    assert hvd.allgather_object(statistics) == [statistics] * hvd.size(), "ranks have bitwise equal statistics"


def normalize_in_half_precision():
    """Normalize values whose squares exceed the range of float16."""
    layer = hvd.SyncBatchNormalization(dtype="mixed_float16")
    values = tf.constant([[900.0], [1100.0]], tf.float16) + 100.0 * hvd.rank()
    with tf.GradientTape() as tape:
        tape.watch(values)
        normalized = layer(values, training=True)
        loss = tf.reduce_sum(tf.cast(normalized, tf.float32) * [[1.0], [2.0]])
    assert (normalized.dtype, layer.moving_variance.dtype, layer.gamma.dtype) == (tf.float16, "float32", "float32")
    everything = np.concatenate([np.array([900.0, 1100.0]) + 100.0 * rank for rank in range(hvd.size())])
    expected = (values.numpy().astype(np.float64).ravel() - everything.mean()) / np.sqrt(everything.var() + 1e-3)
    np.testing.assert_allclose(normalized.numpy().ravel(), expected, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(layer.moving_variance.numpy(), 0.99 + 0.01 * everything.var(), rtol=1e-5)
    assert np.isfinite(tape.gradient(loss, values).numpy()).all()


def penalize_gradients(in_graph, masked):
    """Compute gradients of a penalty on the gradients of the inputs, which are second derivatives."""
    random = np.random.default_rng(3)
    values = random.normal(size=(7, 2))
    mask = tf.constant(random.uniform(size=7) < 0.8) if masked else tf.constant([True] * 7)
    factors = tf.constant(random.normal(size=(7, 2)))
    part = slice(0, 3) if hvd.rank() == 0 else slice(3, 7)

    def second_derivative(layer, rows):
        rank_values = tf.constant(values[rows])
        with tf.GradientTape() as outer:
            outer.watch(rank_values)
            with tf.GradientTape() as inner:
                inner.watch(rank_values)
                normalized = layer(rank_values, training=True, mask=mask[rows] if masked else None)
                loss = tf.reduce_sum(normalized**2 * factors[rows])
            penalty = tf.reduce_sum(tf.square(inner.gradient(loss, rank_values)))
        return outer.gradient(penalty, rank_values)

    def run(layer, rows):
        layer.build([None, 2])
        step = lambda: second_derivative(layer, rows)  # noqa: E731
        return (tf.function(step, autograph=False) if in_graph else step)().numpy()

    alone = run(keras.layers.BatchNormalization(dtype="float64"), slice(None))
    together = run(hvd.SyncBatchNormalization(dtype="float64"), part)
    np.testing.assert_allclose(together, alone[part], rtol=1e-6, atol=1e-9)


def call_a_layer_in_inference_mode_on_one_rank():
    """Call the layer only on rank 0; the call does not wait for rank 1."""
    layer = hvd.SyncBatchNormalization()
    if hvd.rank() == 0:
        assert layer(tf.ones([2, 3])).numpy() == pytest.approx(1.0, abs=1e-3)
        layer.trainable = False
        assert layer(tf.ones([2, 3]), training=True).numpy() == pytest.approx(1.0, abs=1e-3)
    hvd.barrier()


def normalize_by_a_process_set():
    """Normalize with a process set of only rank 1; the result equals that of Keras' layer."""
    alone = hvd.add_process_set([1])
    if hvd.rank() == 1:
        sync_layer = hvd.SyncBatchNormalization(process_set=alone)
        values = tf.constant([[1.0], [4.0]])
        results = []
        for layer in (sync_layer, keras.layers.BatchNormalization()):
            with tf.GradientTape() as tape:
                tape.watch(values)
                loss = tf.reduce_sum(layer(values, training=True) ** 3)
            gradient = tape.gradient(loss, values).numpy()
            results.append([layer.moving_mean.numpy(), layer.moving_variance.numpy(), gradient])
        for result, expected in zip(*results, strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-4)
    hvd.remove_process_set(alone)


def refuse_no_rows_at_all():
    with pytest.raises(ValueError, match="no rank has a row in this step"):
        hvd.SyncBatchNormalization()(tf.zeros([0, 3]), training=True)


def mask_all_values(in_graph):
    """Compare a step without any included value with that of Keras' layer."""
    values, mask = tf.reshape(tf.range(12.0), [2, 2, 3]), tf.zeros([2, 2], tf.bool)
    results = []
    for layer in (hvd.SyncBatchNormalization(), keras.layers.BatchNormalization()):
        layer.build(values.shape)
        call = tf.function(layer, autograph=False) if in_graph else layer
        with tf.GradientTape() as tape:
            tape.watch(values)
            outputs = call(values, training=True, mask=mask)
            loss = tf.reduce_sum(outputs**2)
        results.append([outputs, tape.gradient(loss, values), layer.moving_mean, layer.moving_variance])
    for result, expected in zip(*results, strict=True):
        np.testing.assert_allclose(result.numpy(), expected.numpy(), rtol=1e-5)


# The tests.


@pytest.mark.parametrize(
    ("variant", "uneven", "in_graph"),
    [
        ("plain", True, False),
        ("plain", False, True),
        ("masked", True, True),
        ("channels first", False, False),
        ("renormalized", True, True),
    ],
)
def test_two_ranks_normalize_like_one_big_batch(group, variant, uneven, in_graph):
    group.run(compare, uneven, variant, in_graph)


@pytest.mark.parametrize("uneven", [True, False], ids=["uneven rows", "a rank without rows"])
def test_three_ranks_normalize_like_one_big_batch(three_ranks, uneven):
    three_ranks.run(compare, uneven, "plain", False)


@pytest.mark.parametrize(("in_graph", "masked"), [(False, False), (True, True)])
def test_second_derivatives_are_those_of_one_big_batch(group, in_graph, masked):
    group.run(penalize_gradients, in_graph, masked)


def test_half_precision_keeps_large_values(group):
    group.run(normalize_in_half_precision)


def test_a_layer_in_inference_mode_does_not_communicate(group):
    group.run(call_a_layer_in_inference_mode_on_one_rank)


def test_a_process_set_normalizes_by_its_own_rows(group):
    group.run(normalize_by_a_process_set)


def test_a_step_without_any_rows_is_an_error_on_all_ranks(group):
    group.run(refuse_no_rows_at_all)


def test_a_saved_model_has_the_layer_with_its_settings_and_statistics(tmp_path):
    layers = [keras.Input((3,)), hvd.SyncBatchNormalization(momentum=0.7, name="normal"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.get_layer("normal").moving_mean.assign([1.0, 2.0, 3.0])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    layer = loaded.get_layer("normal")
    assert type(layer) is hvd.SyncBatchNormalization
    assert layer.momentum == 0.7
    rows = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(loaded.predict(rows, verbose=0), model.predict(rows, verbose=0))


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_step_whose_mask_excludes_all_values_is_that_of_keras(group, in_graph):
    group.run(mask_all_values, in_graph)
