"""Networks and rows for the tests of training with KerasEstimator."""

from __future__ import annotations

import keras
import numpy as np

from tests.unit.estimators.arrays import dealt, schema

DATA = schema(x=("feature", "float64", (6,), "array"), y=("label", "int64", (), "scalar"))
WEIGHTED = schema(
    x=("feature", "float64", (6,), "array"), y=("label", "int64", (), "scalar"), w=("weight", "float64", (), "scalar")
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
    """Return the part of ``rank`` of the rows of all steps."""
    found = rows(sum(map(sum, sizes)))
    return dealt({name: values for name, values in found.items() if name in data.names()}, sizes, rank, data)


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
