"""Two ranks of Keras are one big batch: weights, statistics and predictions equal those of plain Keras."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest

import sparkhvd.keras as hvd
from sparkhvd.comm import session
from sparkhvd.data import ColumnSpec, DataSchema
from sparkhvd.data.schema import columns
from sparkhvd.errors import ParamError
from sparkhvd.estimators.keras.losses.divisors import CurrentBatch
from sparkhvd.estimators.keras.plugin import PLUGIN
from sparkhvd.estimators.keras.serialization import artifact
from sparkhvd.estimators.keras.statistics import variables_independent_of_rows
from sparkhvd.estimators.training.logs.history import average_over_ranks
from tests.unit.estimators.arrays import ArraySource, Hooks, partition_rows, schema, spec
from tests.unit.estimators.keras.networks import (
    DATA,
    EMPTY_END,
    EMPTY_WITHIN,
    EVEN,
    PARTIAL_END,
    TWO_LABELS,
    WEIGHTED,
    TwoOptimizers,
    buffers,
    built,
    network,
    network_with_dropout,
    network_with_noise,
    normalized_with_two_outputs,
    parameters,
    rows,
    rows_with_two_labels,
    source,
    two_losses,
    weights_and_noise,
    with_torch_statistics,
)


def train_as_rank(sizes, weighted, passes=1):
    data = WEIGHTED if weighted else DATA
    world = session.current().world
    train_spec = spec(data, epochs=2, backward_passes_per_step=passes)
    trainer = PLUGIN.trainer(PLUGIN.pack(parameters(data)), train_spec, world)
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


def count_losses():
    """Train a network with a metric; return the backend, and how often the loss was computed or traced."""
    loss = keras.losses.SparseCategoricalCrossentropy
    with mock.patch.object(loss, "call", autospec=True, side_effect=loss.call) as computed:
        train_as_rank(EVEN, False)
    return keras.config.backend(), computed.call_count


def test_tensorflow_traces_each_step_of_a_network_once(group):
    for backend, count in group.run(count_losses):
        assert backend == "torch" or count == 2, "one for training, one for validation"


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
        ([*EMPTY_WITHIN, (2, 1)], False, 1),
        (EMPTY_END, True, 1),
        (EMPTY_END, True, 3),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in ((EVEN, False, 1), (EVEN, True, 1), (PARTIAL_END, True, 1), (PARTIAL_END, False, 2))
        ),
    ],
)
def test_ranks_are_one_big_batch(group, sizes, weighted, passes):
    (mine, record), (other, _) = group.run(train_as_rank, sizes, weighted, passes)
    expected, logs, evaluated = train_plainly(sizes, weighted, passes)
    for one, two, plain in zip(mine, other, expected, strict=True):
        np.testing.assert_array_equal(one, two, "ranks must end with the same weights")
        assert np.linalg.norm(one - plain) <= 1e-4 * np.linalg.norm(plain)
    assert record.train["loss"] == pytest.approx(float(logs["loss"]), rel=1e-3)
    assert record.train["accuracy"] == pytest.approx(float(logs["accuracy"]), abs=1e-6)
    if not weighted:
        assert record.validation["loss"] == pytest.approx(evaluated["loss"], rel=1e-3)
        assert record.validation["accuracy"] == pytest.approx(evaluated["accuracy"], abs=1e-6)


def train_two_outputs(sizes):
    world, plain = session.current().world, source(sizes, session.current().world.rank, WEIGHTED)
    params = parameters(
        TWO_LABELS, model=normalized_with_two_outputs(), loss=two_losses(), loss_weights=[1.0, 0.5], metrics=None
    )
    trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(TWO_LABELS, epochs=2), world)
    train = ArraySource(TWO_LABELS, rows_with_two_labels(plain.rows()), plain.mine, plain.everyones)
    trainer.fit(train, None, Hooks())
    return [weight for head in trainer._model.heads for weight in head.get_weights()]


def test_ranks_are_one_big_batch_for_a_subclass_with_a_preprocessing_layer_and_two_weighted_outputs(group):
    mine, other = group.run(train_two_outputs, EMPTY_END)
    model, data = normalized_with_two_outputs(), rows_with_two_labels(sum(map(sum, EMPTY_END)))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss=two_losses(), loss_weights=[1.0, 0.5])
    weights = (data["w"], data["w"])
    model.fit(data["x"], (data["y"], data["z"]), 8, 2, sample_weight=weights, shuffle=False, verbose=0)
    expected = [weight for head in model.heads for weight in head.get_weights()]
    for one, two, plain in zip(mine, other, expected, strict=True):
        np.testing.assert_array_equal(one, two)
        assert np.linalg.norm(one - plain) <= 1e-4 * np.linalg.norm(plain)


class ExtraBatch(keras.callbacks.Callback):
    """Trains on one more batch after the epoch."""

    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    def on_epoch_end(self, epoch, logs=None):
        self.model.train_on_batch(**self.columns)


def train_on_an_extra_batch(sizes):
    world = session.current().world
    extra = {name: values[world.rank : 8 : world.size] for name, values in rows(8).items() if name != "w"}
    params = parameters(optimizer=keras.optimizers.SGD(0.1), callbacks=[ExtraBatch(extra)])
    trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(DATA), world)
    trainer.fit(source(sizes, world.rank), None, Hooks())
    return trainer._model.get_weights()


def test_a_batch_that_a_callback_trains_counts_once(group):
    mine, other = group.run(train_on_an_extra_batch, EVEN)
    model, data, extra = network(), rows(sum(map(sum, EVEN))), rows(8)
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=parameters()["loss"])
    model.fit(data["x"], data["y"], 8, shuffle=False, verbose=0)
    model.train_on_batch(extra["x"], extra["y"])
    for one, two, plain in zip(mine, other, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, plain, rtol=1e-4, atol=1e-5)


def spectrally_normalized_network():
    """Return a network with two normalized kernels; the first one is trained, the second one frozen."""
    start = network()
    layers = [keras.layers.SpectralNormalization(layer) for layer in start.layers]
    model = keras.Sequential([keras.Input((6,)), *layers])
    layers[1].trainable = False
    for layer in layers:
        layer.vector_u.assign(np.ones(layer.vector_u.shape))
    return model


def train_with_spectral_normalization(sizes):
    world = session.current().world
    params = parameters(model=spectrally_normalized_network(), optimizer=keras.optimizers.SGD(0.1))
    trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(DATA), world)
    trainer.fit(source(sizes, world.rank), None, Hooks())
    return trainer._model.get_weights()


def test_spectral_normalization_continues_in_the_steps_of_a_rank_without_rows(group):
    mine, other = group.run(train_with_spectral_normalization, EMPTY_WITHIN)
    model, data = spectrally_normalized_network(), rows(sum(map(sum, EMPTY_WITHIN)))
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=parameters()["loss"])
    model.fit(data["x"], data["y"], 8, shuffle=False, verbose=0)
    for one, two, plain in zip(mine, other, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, plain, rtol=1e-4, atol=1e-5)


class WithUnusedLayer(keras.Model):
    """Has a layer that it never calls, so that Keras does not build it."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = (keras.layers.SpectralNormalization(keras.layers.Dense(1)) for _ in range(2))

    def call(self, inputs, training=False):
        return self.used(inputs, training=training)


@pytest.mark.filterwarnings("ignore:.*it has unbuilt state:UserWarning")  # of Keras
def test_a_spectral_normalization_that_a_model_never_calls_has_no_variables():
    model = WithUnusedLayer()
    model(np.ones((1, 2), np.float32))
    result = variables_independent_of_rows(model)
    assert [id(variable) for variable in result] == [id(model.used.vector_u), id(model.used.kernel)]


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


class ValidatedBuffers(keras.callbacks.Callback):
    """Records the buffers with which the model is validated."""

    def on_test_begin(self, logs=None):
        self.recorded = buffers(self.model)


def train_with_buffers(sizes, folder):
    """Return the buffers at the validation and in the exported model; None on a backend without them."""
    if keras.config.backend() != "torch":
        return None
    world = session.current().world
    packed = PLUGIN.pack(parameters(model=with_torch_statistics(), callbacks=[ValidatedBuffers()]))
    trainer = PLUGIN.trainer(packed, spec(DATA), world)
    trainer.fit(source(sizes, world.rank), source(sizes, world.rank), Hooks())
    own = Path(folder, str(world.rank))
    own.mkdir()
    trainer.export(own)
    return trainer._package.callbacks[0].recorded, buffers(artifact.load_model(own, compiled=False))


def test_buffers_of_pytorch_modules_are_means_over_the_rows_of_all_ranks(group, tmp_path):
    outcomes = group.run(train_with_buffers, EMPTY_END, str(tmp_path))
    if outcomes[0] is None:
        return
    means, data = np.zeros(2), rows(sum(map(sum, EMPTY_END)))["x"]
    for step in EMPTY_END:
        for rank, count in enumerate(step):
            batch, data = data[:count], data[count:]
            if count:
                means[rank] = 0.9 * means[rank] + 0.1 * batch.mean()
    (mean, variance, batches), *others = [result for outcome in outcomes for result in outcome]
    assert mean == pytest.approx(np.average(means, weights=np.sum(EMPTY_END, axis=0)), rel=1e-4)
    assert batches == len(EMPTY_END)
    for other in others:
        assert [mean, variance, batches] == other


UNEVEN = [
    pytest.param([(5, 3), (4, 4), (8, 0), (1, 0)], id="a rank without rows"),
    pytest.param(PARTIAL_END, marks=pytest.mark.soak, id="fewer rows at the end"),
]


class TwoPlainOptimizers(TwoOptimizers):
    @staticmethod
    def make_other_optimizer():
        return keras.optimizers.SGD(0.05)


def train_with_two_optimizers(sizes):
    compiled_with = keras.optimizers.SGD(0.1, name="sgd")
    params = parameters(model=built(TwoOptimizers), optimizer=compiled_with, loss="mse", metrics=None)
    world = session.current().world
    if world.rank == 0:  # like a driver that has checked the model: the next optimizer has another name
        keras.optimizers.SGD()
    trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(DATA, epochs=2), world)
    trainer.fit(source(sizes, world.rank), None, Hooks())
    if world.rank != 0:  # makes the names equal for the next case
        keras.optimizers.SGD()
    return trainer._model.get_weights()


@pytest.mark.parametrize("sizes", UNEVEN)
def test_every_gradient_of_a_user_defined_step_is_weighted_by_the_rows_of_its_batch(group, sizes):
    model, data = built(TwoPlainOptimizers), rows(sum(map(sum, sizes)))
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", jit_compile=False)
    model.fit(data["x"].astype(np.float32), data["y"], 8, 2, shuffle=False, verbose=0)
    for result in group.run(train_with_two_optimizers, sizes):
        for one, other in zip(result, model.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", UNEVEN)
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


@pytest.mark.parametrize("make", [network_with_dropout, network_with_noise], ids=["layers", "global generators"])
def test_every_rank_draws_its_own_random_numbers(group, make):
    (weights, first), (others, second) = group.run(weights_and_noise, make)
    assert not np.array_equal(first, second)
    for mine, other in zip(weights, others, strict=True):
        np.testing.assert_array_equal(mine, other)


def devices_by_torch():
    """Return which of two GPUs a rank uses, and the device of a transform; None on another backend."""
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
    result = group.run(devices_by_torch)
    assert result in ([None, None], [([0], "cpu", "cuda:1", "cpu"), ([1], "cpu", "cuda:1", "cpu")])


def train_on_vectors(sparse):
    """Return the weights after training on vectors with half of their elements 0, or the error if they are rejected."""
    vector = ColumnSpec("x", "float64", (6,), "feature", "vector", sparse=sparse, entries=6 if sparse else None)
    data = DataSchema((vector, DATA["y"]))
    all_rows = source(PARTIAL_END, session.current().world.rank)
    dense = all_rows.columns["x"] * (np.arange(6) % 2 == np.arange(len(all_rows.columns["x"]))[:, None] % 2)
    if sparse:
        all_rows.columns["x"] = columns.empty(vector, len(dense))
        all_rows.columns["x"]["indices"] = np.where(dense != 0, np.arange(6), -1)
        all_rows.columns["x"]["values"] = dense
    else:
        all_rows.columns["x"] = dense
    on_tensorflow = keras.config.backend() == "tensorflow"
    model = keras.Sequential([keras.Input((6,), sparse=sparse and on_tensorflow), keras.layers.Dense(3)])
    model.set_weights([np.full(weight.shape, 0.1) for weight in model.get_weights()])
    try:
        payload = PLUGIN.pack(parameters(data, model=model))
    except ParamError as error:
        return str(error)
    trainer = PLUGIN.trainer(payload, spec(data, epochs=2), session.current().world)
    trainer.fit(ArraySource(data, all_rows.columns, all_rows.mine, all_rows.everyones), None, Hooks())
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


def train_in_float8(sizes, passes, plain=False):
    """Return the weights by layer and name; among them are the maxima and scales of each layer."""
    model = network()
    for layer in model.layers:
        layer.quantize("float8")
    accumulated = passes if plain and passes > 1 else None
    optimizer = keras.optimizers.SGD(0.02, gradient_accumulation_steps=accumulated)
    if plain:
        data = rows(sum(map(sum, sizes)))
        model.compile(optimizer=optimizer, loss=parameters()["loss"], jit_compile=False)
        model.fit(data["x"], data["y"], 8, epochs=2, shuffle=False, verbose=0)
    else:
        params, world = parameters(model=model, optimizer=optimizer), session.current().world
        steps = spec(DATA, epochs=2, backward_passes_per_step=passes)
        trainer = PLUGIN.trainer(PLUGIN.pack(params), steps, world)
        trainer.fit(source(sizes, world.rank), None, Hooks())
        model = trainer._model
    weights = [(index, weight) for index, layer in enumerate(model.layers) for weight in layer.weights]
    return {f"{index} {weight.name}": keras.ops.convert_to_numpy(weight) for index, weight in weights}


@pytest.mark.parametrize(
    ("sizes", "passes"), [([(5, 3), (0, 8), (6, 2), (2, 0)], 1), ([(5, 3), (0, 8), (6, 2), (4, 4)], 2)]
)
def test_the_scales_of_float8_layers_are_those_of_the_rows_of_all_ranks(group, sizes, passes):
    first, second = group.run(train_in_float8, sizes, passes)
    plain = group.run(train_in_float8, sizes, passes, True)[0]
    assert first.keys() == plain.keys()
    for name, value in plain.items():
        assert np.array_equal(first[name], second[name]), name
        of_gradients = 2 / passes if "outputs_grad" in name else 1  # the ranks' gradients are averaged
        assert np.linalg.norm(first[name] / of_gradients - value) <= 0.02 * np.linalg.norm(value), name


def test_sparse_columns_train_the_same_weights_on_tensorflow_and_are_rejected_elsewhere(group):
    on_sparse, on_dense = (group.run(train_on_vectors, sparse)[0] for sparse in (True, False))
    if isinstance(on_sparse, str):
        assert "'x' is in sparse_cols, but only Keras' TensorFlow backend takes sparse tensors here" in on_sparse
        return
    for one, other in zip(on_sparse, on_dense, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


TEXTS = schema(x=("feature", "str", (), "scalar"), y=("label", "int64", (), "scalar"))


class WordEmbedding(keras.Model):
    """A subclassed model without declared inputs, which learns from the indices of words."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.lookup = keras.layers.StringLookup(vocabulary=["one", "two"])
        self.embedding = keras.layers.Embedding(3, 3, embeddings_initializer="ones")

    def call(self, words):
        return self.embedding(self.lookup(words)[:, 0])


def train_on_texts(sizes):
    """Return the weights after training on words, or the error if they are rejected."""
    count, rank = sum(map(sum, sizes)), session.current().world.rank
    model = WordEmbedding()
    if keras.config.backend() == "tensorflow":
        model(keras.ops.convert_to_tensor([["one"]]))
    else:
        model = network()
    all_rows = {"x": np.array(["one", "two", "zwölf"], object)[np.arange(count) % 3], "y": np.arange(count) % 3}
    try:
        payload = PLUGIN.pack(parameters(TEXTS, model=model))
    except ParamError as error:
        return str(error)
    trainer = PLUGIN.trainer(payload, spec(TEXTS, epochs=2), session.current().world)
    trainer.fit(partition_rows(all_rows, sizes, rank, TEXTS), None, Hooks())
    return trainer._model.get_weights()


def test_text_trains_a_subclass_on_tensorflow_and_is_rejected_elsewhere(group):
    """A rank may have no rows in the first step."""
    weights, other = group.run(train_on_texts, [(8, 0), *PARTIAL_END])
    if isinstance(weights, str):
        assert "'x' holds text, but only Keras' TensorFlow backend has string tensors" in weights
        return
    for one, two in zip(weights, other, strict=True):
        np.testing.assert_array_equal(one, two)
    assert weights[0].argmax(axis=1).tolist() == [2, 0, 1], "the label of each word"


class RejectsBelowOne(keras.layers.Layer):
    """Rejects ids below 1."""

    def call(self, ids):
        if keras.config.backend() == "tensorflow":
            import tensorflow as tf  # noqa: PLC0415

            with tf.control_dependencies([tf.debugging.assert_greater_equal(ids, 1.0)]):
                return tf.identity(ids)
        assert float(ids.min()) >= 1
        return ids


def train_without_a_row(sizes):
    """Train on a rank without rows, which uses a row of another rank as placeholder."""
    model, rank = (
        keras.Sequential([keras.Input((6,)), RejectsBelowOne(), *network().layers]),
        session.current().world.rank,
    )
    train_spec = spec(DATA, epochs=1, sample={"x": np.ones((1, 6)), "y": np.zeros(1, np.int64)})
    trainer = PLUGIN.trainer(PLUGIN.pack(parameters(model=model)), train_spec, session.current().world)
    train = source(sizes, rank)
    train.columns["x"] = np.abs(train.columns["x"]) + 1
    trainer.fit(train, train, Hooks())


def test_the_placeholder_of_a_rank_without_rows_is_valid_for_the_model(group):
    group.run(train_without_a_row, [(4, 0), (4, 0)])


def standardized(labels, outputs):
    """Return a loss with a gradient that is NaN for a batch of one row."""
    deviations = outputs[:, 0] - keras.ops.mean(outputs[:, 0])
    return (keras.ops.cast(labels, "float32") - deviations / keras.ops.sqrt(keras.ops.mean(deviations**2))) ** 2


class GradientsInOwnGraph(keras.Model):
    """Computes the loss and its gradients in a graph of its own, like a user's ``tf.function``."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.network = network()

    def call(self, values):
        return self.network(values)

    def train_step(self, data):
        values, labels = data
        if keras.config.backend() != "tensorflow":
            return super().train_step(data)
        import tensorflow as tf  # noqa: PLC0415

        @tf.function(autograph=False)
        def computed():
            with tf.GradientTape() as tape:
                loss = self.compute_loss(values, labels, self(values))
                scaled = self.optimizer.scale_loss(loss)
            return loss, tape.gradient(scaled, [variable.value for variable in self.trainable_variables])

        loss, result = computed()
        self.optimizer.apply(result, self.trainable_variables)
        return {"loss": loss}


def train_with_a_placeholder_without_a_gradient(sizes, kind):
    model = built(kind) if kind else network()
    params = parameters(model=model, loss=standardized, optimizer=keras.optimizers.SGD(0.01), metrics=None)
    trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(DATA), session.current().world)
    calls, share = [], CurrentBatch.share
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CurrentBatch, "share", lambda batch: calls.append(batch) or share(batch))
        trainer.fit(source(sizes, session.current().world.rank), None, Hooks())
    return trainer._model.get_weights(), len(calls)


def test_the_gradient_of_a_placeholder_is_ignored_even_if_it_is_not_finite(group):
    sizes = [(4, 4), (8, 0)]
    (mine, calls), (other, _) = group.run(train_with_a_placeholder_without_a_gradient, sizes, None)
    assert calls == len(sizes), "the share of a batch is computed once, because a graph waits for Python"
    in_own_graph, _ = group.run(train_with_a_placeholder_without_a_gradient, sizes, GradientsInOwnGraph)[0]
    for one, two, three in zip(mine, other, in_own_graph, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, three, rtol=1e-6)


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

    def train_step(self, *data):
        values, labels = data[-1][:2]
        distance(labels, self(values))
        return super().train_step(*data)


def distance(labels, outputs):
    return keras.ops.mean(keras.ops.absolute(labels - outputs))


def train_on_doubles():
    data = schema(x=("feature", "float64", (6,), "array"), y=("label", "float64", (1,), "array"))
    model, all_rows = OwnStep(), rows(8)
    model(np.zeros((1, 6), np.float32))
    params = parameters(data, model=model, loss="mse", metrics=[distance])
    trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(data), session.current().world)
    columns = {"x": all_rows["x"], "y": all_rows["w"][:, None]}
    own = partition_rows(columns, [(4, 4)], session.current().world.rank, data)
    trainer.fit(own, own, hooks := Hooks())
    report = hooks.reports[-1]
    return [report.validation["loss"][0], *(report.train[name][0] for name in ("loss", "distance"))]


def test_user_defined_steps_and_metrics_get_labels_with_the_dtype_of_model_fit(group):
    assert np.isfinite(group.run(train_on_doubles)).all()


def train_and_return_tuned_datasets():
    rank = session.current().world.rank
    trainer = PLUGIN.trainer(PLUGIN.pack(parameters()), spec(DATA), session.current().world)
    datasets, fit = [], trainer._model.fit

    def recorded(data, validation_data, **options):
        datasets.extend([data, validation_data])
        return fit(data, validation_data=validation_data, **options)

    object.__setattr__(trainer._model, "fit", recorded)
    trainer.fit(source(EVEN, rank), source(EVEN, rank), Hooks())
    pipelines = [data for data in datasets if not isinstance(data, keras.utils.PyDataset)]
    assert len(pipelines) == (2 if keras.config.backend() == "tensorflow" else 0)
    return [pipeline for pipeline in pipelines if pipeline.options().autotune.enabled is not False]


def test_no_pipeline_tunes_itself_because_its_end_could_take_a_minute(group):
    assert group.run(train_and_return_tuned_datasets) == [[], []]
