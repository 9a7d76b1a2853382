"""Networks and rows for the tests of training with KerasEstimator."""

from __future__ import annotations

from dataclasses import dataclass, field

import keras
import numpy as np
import pytest

import sparkhvd.keras as hvd
from sparkhvd.comm import session
from sparkhvd.data import ColumnSpec, DataSchema
from sparkhvd.errors import HorovodInternalError
from sparkhvd.estimators.keras.plugin import PLUGIN
from tests.unit.estimators.arrays import Hooks, partition_rows, schema, spec

DATA = schema(x=("feature", "float64", (6,), "array"), y=("label", "int64", (), "scalar"))
WEIGHTED = schema(
    x=("feature", "float64", (6,), "array"), y=("label", "int64", (), "scalar"), w=("weight", "float64", (), "scalar")
)


# For tests of code that does not depend on the backend: PyTorch traces no graphs.
ON_TORCH = pytest.mark.parametrize(
    "group", [pytest.param("tensorflow", marks=pytest.mark.soak), "torch"], indirect=True
)


def network():
    """Return a network with the same weights on every backend, and with a regularization loss."""
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
    """Return a rank's part of the rows of all steps."""
    columns = rows(sum(map(sum, sizes)))
    return partition_rows({name: values for name, values in columns.items() if name in data.names()}, sizes, rank, data)


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


SEQUENCE_COLUMNS = {"x": ("feature", "int64", (5,), "array"), "y": ("label", "float64", (5, 1), "array")}


SEQUENCES = schema(**SEQUENCE_COLUMNS)


WEIGHTED_SEQUENCES = schema(**SEQUENCE_COLUMNS, w=("weight", "float64", (), "scalar"))


def masked_network():
    """Return a network whose weights violate a constraint until the end of the first step."""
    layers = [keras.layers.Embedding(4, 3, mask_zero=True), keras.layers.Dense(1, kernel_constraint="non_neg")]
    model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
    random = np.random.default_rng(3)
    model.set_weights([random.normal(size=weight.shape) / 4 for weight in model.get_weights()])
    return model


def sequences(count):
    random = np.random.default_rng(2)
    columns = {"x": random.integers(0, 4, (count, 5)), "y": random.normal(size=(count, 5, 1))}
    return {**columns, "w": random.uniform(size=count)}


def raise_lost_rank(*_):
    """Fail as a collective does after the loss of a rank."""
    raise HorovodInternalError("rank 1 was lost")


# The number of rows of every rank in each step of an epoch.
EVEN = [(4, 4)] * 10


PARTIAL_END = [(4, 4)] * 9 + [(2, 1)]


EMPTY_END = [(4, 4)] * 9 + [(1, 0)]


EMPTY_WITHIN = [(4, 4)] * 4 + [(8, 0)] + [(4, 4)] * 4 + [(0, 8)] + [(4, 4)]


class NormalizedWithTwoOutputs(keras.Model):
    """A model with two outputs that preprocesses its columns."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.scale = keras.layers.Normalization()
        self.heads = [keras.layers.Dense(3, name="y"), keras.layers.Dense(1, name="z")]

    def call(self, values):
        scaled = self.scale(values)
        return tuple(head(scaled) for head in self.heads)


TWO_LABELS = DataSchema((*WEIGHTED.columns, ColumnSpec("z", "float64", (), "label", "scalar")))


def two_losses():
    return [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"]


def normalized_with_two_outputs():
    model = NormalizedWithTwoOutputs()
    model.scale.adapt(2 * rows(50)["x"] + 1)
    model(np.zeros((1, 6), np.float32))
    random = np.random.default_rng(3)
    for head in model.heads:
        head.set_weights([random.normal(size=weight.shape) / 4 for weight in head.get_weights()])
    return model


def rows_with_two_labels(count):
    columns = rows(count)
    return {**columns, "z": columns["x"].sum(axis=1)}


def gradients(model, batch, variables):
    """Return the gradients of a loss, computed by the backend."""
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
    """Applies the gradients of one optimizer twice per batch, and those of another optimizer once."""

    def __init__(self, **more):
        super().__init__(**more)
        self.inner, self.outer = keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)
        self.other = self.make_other_optimizer()

    @staticmethod
    def make_other_optimizer():
        return hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))

    def call(self, values):
        return self.outer(self.inner(values))

    def train_step(self, data):
        for _ in range(2):
            _, slopes = gradients(self, data, self.inner.trainable_variables)
            self.optimizer.apply(slopes, self.inner.trainable_variables)
        loss, slopes = gradients(self, data, self.outer.trainable_variables)
        self.other.apply(slopes, self.outer.trainable_variables)
        return {"loss": loss}


def built(kind):
    model = kind()
    model(np.zeros((2, 6), np.float32))
    random = np.random.default_rng(3)
    model.set_weights([random.normal(size=weight.shape) / 4 for weight in model.get_weights()])
    return model


def network_with_dropout():
    first, *rest = network().layers
    return keras.Sequential([keras.Input((6,)), first, keras.layers.Dropout(0.5, seed=1), *rest])


def with_torch_statistics():
    """Return a network that contains, on the torch backend, a PyTorch module with buffers."""
    normalization = []
    if keras.config.backend() == "torch":
        import torch  # noqa: PLC0415

        module = keras.layers.TorchModuleWrapper(torch.nn.BatchNorm1d(1), output_shape=(None, 1, 6))
        normalization = [keras.layers.Reshape((1, 6)), module, keras.layers.Flatten()]
    start = network()
    model = keras.Sequential([keras.Input((6,)), *normalization, *start.layers])
    model.set_weights([*model.get_weights()[: -len(start.weights)], *start.get_weights()])
    return model


def buffers(model):
    """Return the buffers of the modules of PyTorch in a model."""
    layers = [layer for layer in model.layers if isinstance(layer, keras.layers.TorchModuleWrapper)]
    return [buffer.detach().cpu().numpy().copy() for layer in layers for buffer in layer.module.buffers()]


def with_moving_statistics():
    """Return a network whose batch normalization has other statistics on every rank, also in PyTorch's module."""
    normalization = keras.layers.BatchNormalization(momentum=0.7)
    model = keras.Sequential([keras.Input((6,)), normalization, *with_torch_statistics().layers])
    model.build((None, 6))
    return model


class GlobalNoise(keras.layers.Layer):
    """Draws from the global random generators of Keras and of its backend."""

    def call(self, values, training=False):
        if not training:
            return values
        shape, noise = keras.ops.shape(values), keras.random.dropout(values, 0.5)
        if keras.config.backend() == "torch":
            import torch  # noqa: PLC0415

            return noise + torch.rand(tuple(shape), device=noise.device)
        import tensorflow as tf  # noqa: PLC0415

        return noise + tf.random.get_global_generator().uniform(shape)


def network_with_noise():
    first, *rest = network().layers
    return keras.Sequential([keras.Input((6,)), first, GlobalNoise(), *rest])


def weights_and_noise(make):
    """Train with a random layer; return the weights, and the layer's output for ones."""
    world, model = session.current().world, make()
    trainer = PLUGIN.trainer(PLUGIN.pack(parameters(model=model)), spec(DATA), world)
    trainer.fit(source(PARTIAL_END, world.rank), None, Hooks())
    output = trainer._model.layers[1](np.ones((4, 16)), training=True)
    return trainer._model.get_weights(), keras.ops.convert_to_numpy(output)


@dataclass
class KeepingFiles(Hooks):
    kept: dict[str, bytes] = field(default_factory=dict)

    def keep_file(self, path):
        self.kept[path.name] = path.read_bytes()
