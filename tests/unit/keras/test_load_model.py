"""``load_model``: files of models with a distributed optimizer."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

import sparkhvd.keras as hvd
from sparkhvd.errors import ConfigError
from tests.unit.keras.networks import fitted, network, rows


def resume_from_h5(folder, steps):
    """Compare training from an .h5 file with training from a .keras file."""
    part = slice(hvd.rank(), None, 2)
    features, targets = (each[part] for each in rows())
    model = network()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), keras.losses.MeanSquaredError())
    for _ in range(steps):
        model.train_on_batch(features, targets)
    weights = []
    for kind in ("keras", "h5"):
        path = str(Path(folder) / f"rank-{hvd.rank()}.{kind}")
        model.save(path)
        again = hvd.load_model(path)
        again.compile(again.optimizer, keras.losses.MeanSquaredError(), jit_compile=False)
        again.train_on_batch(features, targets)
        assert int(keras.ops.convert_to_numpy(again.optimizer.iterations)) == steps + 1
        weights.append(again.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    return weights[1]


@pytest.mark.parametrize("steps", [2, 0])
def test_training_resumes_from_a_file_of_the_older_format(group, tmp_path, steps):
    first, second = group.run(resume_from_h5, str(tmp_path), steps)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_file_with_another_state_names_the_newer_format(tmp_path):
    h5py = pytest.importorskip("h5py")
    model = network()
    model.compile(keras.optimizers.Adam(), keras.losses.MeanSquaredError())
    model.optimizer.build(model.trainable_variables)
    path = tmp_path / "model.h5"
    model.save(path)
    with h5py.File(path, "a") as file:
        file["optimizer_weights"].attrs["weight_names"] = file["optimizer_weights"].attrs["weight_names"][:3]
    with pytest.raises(
        ConfigError, match=r"10 variables, but the file has 3, or some of other shapes.* Save the model as a \.keras"
    ):
        hvd.load_model(str(path))


def train_from_a_file(folder):
    """Compare the training of a model that sums the gradients of two batches with that of its file."""
    path = str(Path(folder) / f"rank-{hvd.rank()}.keras")
    model = network()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), backward_passes_per_step=2), "mse")
    model.optimizer.build(model.trainable_variables)
    model.save(path)
    weights = []
    for each in (model, hvd.load_model(path, backward_passes_per_step=2), hvd.load_model(path)):
        fitted(each, each.optimizer, slice(0, 8), 4)
        weights.append(each.get_weights()[0])
    assert np.array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])


def test_the_gradients_of_a_loaded_optimizer_may_be_summed_as_before(group, tmp_path, caplog):
    group.run(train_from_a_file, str(tmp_path))
    hvd.load_model(str(tmp_path / "rank-0.keras"))
    assert "takes a step every 2 batches, with the mean of their gradients" in caplog.text


def test_a_model_with_loss_scaling_is_loaded_with_its_optimizer(tmp_path):
    path = str(tmp_path / "model.keras")
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        model.optimizer.build(model.trainable_variables)
        model.save(path)
        optimizer = hvd.load_model(path).optimizer
    finally:
        keras.config.set_dtype_policy("float32")
    assert type(optimizer) is keras.optimizers.LossScaleOptimizer
    with pytest.raises(ConfigError, match="already distributed"):
        hvd.DistributedOptimizer(optimizer.inner_optimizer)
