"""What the tests of an estimator's training with Keras train, and on which rows."""

from __future__ import annotations

import keras
import numpy as np

from tests.unit.estimators.arrays import ArraySource, schema

DATA = schema(x=("feature", "float64", (6,), "array"), y=("label", "int64", (), "scalar"))
WEIGHTED = schema(
    x=("feature", "float64", (6,), "array"), y=("label", "int64", (), "scalar"), w=("weight", "float64", (), "scalar")
)


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
