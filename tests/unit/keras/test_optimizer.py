"""``DistributedOptimizer``: its exchange, its settings and its copies."""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import contextmanager

import keras
import numpy as np
import pytest

import sparkhvd.keras as hvd
from sparkhvd.errors import ConfigError, UnsupportedError
from tests.unit.keras.networks import fitted, network, ranks_with, rows


def one_big_batch(options):
    """Compare ranks that read every other row of each batch with one process that reads whole batches."""
    alone, together = network(), network()
    passes = options.get("backward_passes_per_step", 1)
    plain = keras.optimizers.SGD(
        0.05, momentum=0.9, global_clipnorm=0.5, **({"gradient_accumulation_steps": passes} if passes > 1 else {})
    )
    fitted(alone, plain, slice(None), 16)
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5), **options)
    fitted(together, wrapped, slice(hvd.rank(), None, 2), 8)
    for one, other in zip(alone.get_weights(), together.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)
    assert type(wrapped).__name__ == "SGD"


def compress():
    plain, packed = network(), network()
    part = slice(hvd.rank(), None, 2)
    fitted(plain, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), part, 8)
    options = {"compression": hvd.Compression.bf16}
    fitted(packed, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), **options), part, 8)
    for one, other in zip(plain.get_weights(), packed.get_weights(), strict=True):
        assert not np.array_equal(one, other)
        np.testing.assert_allclose(one, other, atol=0.02)
    return packed.get_weights()


def compute_and_apply():
    """Compute gradients and apply them in two calls, as custom training loops for Keras 2 do."""
    if keras.config.backend() == "torch":
        with pytest.raises(UnsupportedError, match="needs Keras' TensorFlow backend"):
            hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)).compute_gradients(None, None)
        return "refused"
    import tensorflow as tf  # noqa: PLC0415  (the other backend does not need it)

    shared, local = tf.Variable(2.0), tf.Variable(2.0)

    def train(passes, **options):
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), op=hvd.Sum, backward_passes_per_step=passes, **options
        )
        optimizer.register_local_var(local)
        for _ in range(passes):
            pairs = optimizer._compute_gradients(
                lambda: (1.0 + hvd.rank()) * (shared + local), [[shared], local], tf.constant(2.0)
            )
            optimizer.apply_gradients(pairs)
        return optimizer, [float(gradient) for gradient, _ in pairs], [float(shared), float(local)]

    optimizer, *once = train(1)
    optimizer.apply_gradients([(tf.constant(1.0), shared)])  # not the result of the call above
    again = float(shared)
    assert [variable.name for variable in optimizer.variables()] == ["iteration", "learning_rate"]
    _, *accumulated = train(2)
    with pytest.raises(ConfigError, match="need the tape that recorded it"):
        optimizer.compute_gradients(tf.constant(1.0), [shared])
    return [*once, again, *accumulated]


@contextmanager
def set_of_this_rank():
    """Provide a process set of this rank alone; the other tests of the group cannot add it again while it exists."""
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    yield sets[hvd.rank()]
    for process_set in sets:
        hvd.remove_process_set(process_set)


def train_apart():
    """Train each rank with its own process set, as if there were no other ranks."""
    alone, together = network(), network()
    part = slice(hvd.rank(), None, 2)
    fitted(alone, keras.optimizers.SGD(0.05), part, 8)
    with set_of_this_rank() as mine:
        fitted(together, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), process_set=mine), part, 8)
    for one, other in zip(alone.get_weights(), together.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def train_embedding():
    """Compare ranks that exchange rows or dense gradients with one rank that trains on whole batches."""
    rng = np.random.default_rng(0)
    words, targets = rng.integers(0, 7, (48, 1)), rng.normal(size=(48, 1)).astype(np.float32)

    def trained(part, batch_size, **options):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Embedding(7, 3), keras.layers.Flatten(), keras.layers.Dense(1)])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05, global_clipnorm=0.5), **options)
        model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
        model.fit(words[part], targets[part], batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    with set_of_this_rank() as mine:
        alone = trained(slice(None), 16, process_set=mine)
    for sparse_as_dense in (False, True):
        together = trained(slice(hvd.rank(), None, 2), 8, sparse_as_dense=sparse_as_dense)
        for one, other in zip(alone, together, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def copies_of(optimizer):
    """Return copies of an optimizer by all methods with which Keras and Python copy objects, by method."""
    config = optimizer.get_config()
    return {
        "from_config": optimizer.from_config(config),
        "class": type(optimizer).from_config(config),
        "copy": copy.copy(optimizer),
        "deepcopy": copy.deepcopy(optimizer),
        "pickle": pickle.loads(pickle.dumps(optimizer)),
    }


def train_with_copies(options):
    """Compare the training of copies of an optimizer with that of the original."""
    part = slice(hvd.rank(), None, 2)
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), **options)
    copies = copies_of(wrapped)
    wanted = network()
    fitted(wanted, wrapped, part, 8)
    for way, optimizer in copies.items():
        model = network()
        fitted(model, optimizer, part, 8)
        for one, other in zip(wanted.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7, err_msg=way)
        assert type(optimizer).__name__ == "SGD"
    return wanted.get_weights()


def keep_the_process_set():
    """Check that a copy uses the same process set, and that pickling a process set is refused."""
    apart = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    mine = apart[hvd.rank()]
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), process_set=mine)
    alone, together = network(), network()
    part = slice(hvd.rank(), None, 2)
    fitted(alone, keras.optimizers.SGD(0.05), part, 8)
    fitted(together, copy.deepcopy(wrapped), part, 8)
    for one, other in zip(alone.get_weights(), together.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    with pytest.raises(ConfigError, match="cannot be pickled: other processes do not know the process set"):
        pickle.dumps(wrapped)
    everybody = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), process_set=hvd.global_process_set)
    assert pickle.loads(pickle.dumps(everybody))._settings.process_set is None
    for each in apart:
        hvd.remove_process_set(each)


def train_with_more_objects_on_one_rank():
    """Create more objects on rank 0, which Keras counts in its names; return the weights after training."""
    for _ in range(2 * (hvd.rank() == 0)):
        keras.optimizers.SGD(), network()
    model = network()
    fitted(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), slice(hvd.rank(), None, 2), 8)
    return model.get_weights()


def combine_steps_with_adasum(optimizer, options):
    """Compare with a loop in which the ranks combine the changes of their weights themselves."""
    together, alone, passes = network(), network(), options.get("backward_passes_per_step", 1)
    part = slice(hvd.rank(), None, 2)
    fitted(together, hvd.DistributedOptimizer(kind_of(optimizer), op=hvd.Adasum, **options), part, 8)

    features, targets = (values[part] for values in rows())
    alone.compile(optimizer=kind_of(optimizer), loss="mse", jit_compile=False)
    kept = 1 - 0.01 * 0.1 if optimizer == "AdamW" else 1  # the factor of the weight decay, which is not part of a step
    for _ in range(3):
        for batch in np.split(np.arange(24), 3 // passes):
            starts = [weights * kept for weights in alone.get_weights()]
            alone.train_on_batch(features[batch], targets[batch])
            steps = hvd.allgather_object([new - old for new, old in zip(alone.get_weights(), starts, strict=True)])
            alone.set_weights([old + adasum(*pair) for old, *pair in zip(starts, *steps, strict=True)])
    for one, other in zip(alone.get_weights(), together.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)
    return together.get_weights()


def kind_of(name):
    return {
        "SGD": keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.5),
        "AdamW": keras.optimizers.AdamW(0.01, weight_decay=0.1),
    }[name]


def adasum(one, other):
    product = (one * other).sum()
    return (1 - product / (2 * (one * one).sum())) * one + (1 - product / (2 * (other * other).sum())) * other


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_predivide_factor": 2.0}, {"backward_passes_per_step": 3, "average_aggregated_gradients": True}],
    ids=["plain", "predivided", "accumulated"],
)
def test_ranks_are_one_big_batch(group, options):
    group.run(one_big_batch, options)


def losses_in_half_precision(op, passes, infinite):
    """Train a layer in mixed_float16; in the third of four batches, all gradients of one rank are infinite."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.25), op=op, backward_passes_per_step=passes)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    features = np.ones((4, 1), np.float32)
    if hvd.rank() == infinite:
        features[2] = np.inf
    model.fit(features, np.full((4, 1), 0.5, np.float32), batch_size=1, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()[0].tolist(), float(model.optimizer.dynamic_scale), int(model.optimizer.iterations)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@pytest.mark.parametrize("infinite", [0, 1, None])
def test_all_ranks_skip_a_step_that_overflows_on_one(group, op, infinite):
    steps, scale = (8, 2.0**15) if infinite is None else (6, 2.0**13)
    expected = ([[0.5 - 0.5 ** (steps + 1)]], scale, steps)  # each step halves the distance from 0.5
    assert group.run(losses_in_half_precision, op, 1, infinite) == [expected] * 2


def test_all_ranks_skip_an_accumulated_batch_that_overflows_on_one(group):
    first, second = group.run(losses_in_half_precision, hvd.Average, 2, 1)
    assert first == second
    assert first[1] == 2.0**13


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain", marks=pytest.mark.soak),
        pytest.param({"backward_passes_per_step": 3, "op": hvd.Sum}, id="accumulated sum"),
        pytest.param({"op": hvd.Adasum}, id="adasum"),
    ],
)
def test_copies_of_an_optimizer_exchange_gradients_with_its_settings(group, options):
    first, second = group.run(train_with_copies, options)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_copies_of_an_optimizer_keep_its_process_set(group):
    group.run(keep_the_process_set)


def test_the_copy_of_a_built_optimizer_warns_that_it_has_no_state():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    optimizer.build(network().trainable_variables)
    with pytest.warns(UserWarning, match="has its settings, but not its state"):
        assert not copy.deepcopy(optimizer).built


def test_an_optimizer_that_weights_the_batches_of_a_fit_is_not_copied():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
    optimizer.weight_by(lambda: 0.5)
    with pytest.raises(ConfigError, match="weights the batches of a running fit"):
        copy.copy(optimizer)


def test_adasum_combines_the_steps_of_the_ranks(group):
    first, second = group.run(combine_steps_with_adasum, "AdamW", {})
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_adasum_combines_steps_from_the_gradients_of_several_batches(group):
    passes = {"backward_passes_per_step": 3, "average_aggregated_gradients": True}
    group.run(combine_steps_with_adasum, "SGD", passes)


def test_gradients_are_exchanged_once_if_they_are_computed_and_applied_in_two_calls(group):
    on_tensorflow = [
        # the local gradient is twice the rank's own factor, divided by the number of ranks
        [[6.0, own], [-4.0, 2.0 - own], -6.0, [2 * own, 2 * own], [-18.0, 2.0 - 3 * own]]
        for own in (1.0, 2.0)
    ]
    assert group.run(compute_and_apply) in (on_tensorflow, ["refused"] * 2)


def test_gradients_may_be_compressed(group):
    first, second = group.run(compress)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_ranks_of_a_process_set_train_independently(group):
    group.run(train_apart)


def test_sparse_gradients_train_like_dense_ones_with_any_number_of_ranks(group):
    group.run(train_embedding)


def test_ranks_train_together_if_one_has_made_more_optimizers_and_layers(group):
    first, second = group.run(train_with_more_objects_on_one_rank)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_invalid_settings_are_rejected():
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    for make, message in [
        (lambda: hvd.DistributedOptimizer(wrapped), "already distributed"),
        (
            lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Max),
            "op=Average, op=Sum or op=Adasum, not max",
        ),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=0), "at least 1"),
        (lambda: hvd.DistributedOptimizer("sgd"), "not a Keras optimizer"),
        (
            lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), compression="fp16"),
            "must be one of hvd.Compression.*got 'fp16'",
        ),
        (
            lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Adasum, gradient_predivide_factor=2.0),
            "needs op=Average",
        ),
        (
            lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Adasum).weight_by(lambda: 0.5),
            "which op=Adasum cannot do",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            make()


def test_multi_optimizers_are_rejected():
    layers = network().layers
    several = getattr(keras.optimizers, "MultiOptimizer", None)
    if several is None:
        pytest.skip("this Keras has no MultiOptimizer")
    with pytest.raises(ConfigError, match="MultiOptimizer cannot be distributed"):
        hvd.DistributedOptimizer(several([(keras.optimizers.SGD(), layers)]))


def apply_gradients_of(variables, op):
    """Apply gradients to some of three variables; Keras drops the variables without a gradient."""
    shared = [keras.Variable(np.zeros(2, np.float32), name=name) for name in "abc"]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=op)
    optimizer.build(shared)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns about missing gradients
        optimizer.apply(
            [
                keras.ops.ones(2) * (hvd.rank() + 1.0) if variable.name in variables[hvd.rank()] else None
                for variable in shared
            ],
            shared,
        )
    return [float(keras.ops.convert_to_numpy(variable)[0]) for variable in shared]


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_variables_without_a_gradient_on_all_ranks_stay_unchanged(group, op):
    assert group.run(apply_gradients_of, ("ac", "ac"), op) == [[-1.5, 0.0, -1.5]] * 2


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_gradients_of_different_variables_are_not_combined(backend):
    with ranks_with(backend, collective_timeout=3.0) as group:
        for outcome in group.outcomes(apply_gradients_of, ("ac", "bc"), hvd.Average):
            assert "sparkhvd.errors." in outcome.failure
