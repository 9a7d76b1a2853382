"""Layers whose gradients stay local to each rank."""

from __future__ import annotations

import copy
import pickle

import keras
import numpy as np
import pytest

import sparkhvd.keras as hvd
from sparkhvd.errors import ConfigError
from tests.unit.keras.networks import fitted, network, rows


def keep_local_layers(passes, scale):
    """Check that an SGD step uses this rank's gradient in the local layer, and the mean of all ranks in the other."""
    part = slice(hvd.rank(), None, 2)
    features, targets = (each[part] for each in rows())

    def changes(optimizer_of):
        model = network()
        before = [np.array(each) for each in model.get_weights()]
        model.compile(optimizer=optimizer_of(model), loss="mse", jit_compile=False)
        for _ in range(passes):
            model.train_on_batch(features, targets)
        return [old - new for old, new in zip(before, model.get_weights(), strict=True)]

    plain = changes(lambda _: keras.optimizers.SGD(0.05, gradient_accumulation_steps=passes if passes > 1 else None))
    partly = changes(
        lambda model: hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.05),
            local_layers=model.layers[0],
            backward_passes_per_step=passes,
            scale_local_gradients=scale,
        )
    )
    factor = passes / (2 if scale else 1)
    for index, (own, found) in enumerate(zip(plain, partly, strict=True)):
        of_all = sum(hvd.allgather_object(own)) / 2 * passes
        np.testing.assert_allclose(found, own * factor if index < 2 else of_all, rtol=1e-4, atol=1e-6)


def clip_beside_a_local_layer():
    """Clip by a norm over several gradients: shared variables stay equal on all ranks."""
    model = network()
    part = slice(hvd.rank(), None, 2)
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.01), local_layers=[model.layers[0]]
    )
    fitted(model, optimizer, part, 8)
    both = hvd.allgather_object(model.get_weights())
    for index, (one, other) in enumerate(zip(*both, strict=True)):
        assert np.array_equal(one, other) == (index >= 2)


def broadcast_all_but_local_layers():
    model = network(seed=hvd.rank())
    own = [np.array(each) for each in model.layers[0].get_weights()]
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.Adam(0.0), local_layers=model.layers[0])
    optimizer.build(model.trainable_variables)
    for variable in optimizer.variables[2:]:  # not the iterations and the learning rate
        variable.assign(keras.ops.full(variable.shape, 1.0 + hvd.rank()))
    fitted(model, optimizer, slice(0, 8), 8, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    for mine, now in zip(own, model.layers[0].get_weights(), strict=True):
        assert np.array_equal(mine, now)
    shared = hvd.allgather_object(model.layers[1].get_weights())
    assert np.array_equal(shared[0][0], shared[1][0])
    local_ids = {id(each) for each in optimizer.local_variables()}
    assert len(local_ids) == 6  # two moments of each of two variables
    sums = hvd.allgather_object([float(np.sum(each)) for each in optimizer.variables[2:] if id(each) in local_ids])
    assert sums[0] != sums[1]
    sums = hvd.allgather_object([float(np.sum(each)) for each in optimizer.variables[2:] if id(each) not in local_ids])
    assert sums[0] == sums[1]


def keep_steps_of_local_layers():
    model = network()
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.05), local_layers=model.layers[0], op=hvd.Adasum)
    fitted(model, optimizer, slice(hvd.rank(), None, 2), 8)
    return model.get_weights()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda x: x.from_config(x.get_config())])
def test_an_optimizer_with_local_variables_is_not_copied(copied):
    model = network()
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.05), local_layers=model.layers[0])
    with pytest.raises(ConfigError, match=r"local variables, which belong to one model\. Wrap a new optimizer"):
        copied(optimizer)


def test_adasum_does_not_combine_the_steps_of_local_layers(group):
    first, second = group.run(keep_steps_of_local_layers)
    assert [np.array_equal(one, other) for one, other in zip(first, second, strict=True)] == [False, False, True, True]


@pytest.mark.parametrize(("passes", "scale"), [(1, True), (1, False), (2, True)])
def test_gradients_of_local_layers_are_not_exchanged(group, passes, scale):
    group.run(keep_local_layers, passes, scale)


def test_local_layers_do_not_affect_shared_variables_and_are_not_broadcast(group):
    group.run(clip_beside_a_local_layer)
    group.run(broadcast_all_but_local_layers)


def test_the_learning_rate_and_the_iterations_are_never_local():
    """An optimizer without further state has as many variables as a layer with a kernel and a bias."""
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=layer)
    optimizer.build(layer.trainable_variables)
    assert [id(each) for each in optimizer.local_variables()] == [id(each) for each in layer.trainable_variables]


def test_a_local_layer_must_be_built():
    optimizer = keras.optimizers.SGD()
    with pytest.raises(ConfigError, match=r"'dense_later' has no variables before it is built\. Build"):
        hvd.PartialDistributedOptimizer(optimizer, local_layers=keras.layers.Dense(2, name="dense_later"))
    hvd.DistributedOptimizer(optimizer)  # the optimizer is unchanged
