"""Networks, rows and ranks for the tests of ``sparkhvd.keras``."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.ranks import RankGroup


def ranks_with(backend, **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", backend)
        return RankGroup(2, imports=("keras", "sparkhvd.keras"), **settings)


def rows():
    rng = np.random.default_rng(3)
    features = rng.normal(size=(48, 5)).astype(np.float32)
    return features, (features @ rng.normal(size=(5, 1))).astype(np.float32)


def network(seed=1):
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((5,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def fitted(model, optimizer, part, batch_size, **options):
    features, targets = rows()
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    return model.fit(
        features[part], targets[part], batch_size=batch_size, epochs=3, shuffle=False, verbose=0, **options
    )
