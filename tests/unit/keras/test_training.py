from __future__ import annotations

import copy
import logging
import pickle
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest

import sparkhvd.keras as hvd
from sparkhvd.comm import interface
from sparkhvd.errors import ConfigError, MismatchError
from tests.ranks import RankGroup


def ranks_with(backend, **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", backend)
        return RankGroup(2, imports=("keras", "sparkhvd.keras"), **settings)


@pytest.fixture(scope="module", params=["tensorflow", "torch"])
def group(request):
    with ranks_with(request.param) as started:
        yield started


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


def train_apart():
    """Train each rank with its own process set, as if there were no other ranks."""
    mine = [hvd.add_process_set([rank]) for rank in range(hvd.size())][hvd.rank()]
    alone, together = network(), network()
    part = slice(hvd.rank(), None, 2)
    fitted(alone, keras.optimizers.SGD(0.05), part, 8)
    fitted(together, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), process_set=mine), part, 8)
    for one, other in zip(alone.get_weights(), together.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


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


def start_from_the_same(folder):
    model = network(seed=hvd.rank())
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(1)
    fitted(model, keras.optimizers.Adam(0.0), slice(None), 16, callbacks=[broadcast])
    for mine, wanted in zip(model.get_weights(), network(seed=1).get_weights(), strict=True):
        assert np.array_equal(mine, wanted)


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


def keep_steps_of_local_layers():
    model = network()
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.05), local_layers=model.layers[0], op=hvd.Adasum)
    fitted(model, optimizer, slice(hvd.rank(), None, 2), 8)
    return model.get_weights()


def reduce_eagerly():
    result = hvd.allreduce(keras.ops.ones((2,)) * hvd.rank(), op=hvd.Sum, name="eager")
    assert keras.ops.convert_to_numpy(result).tolist() == [1.0, 1.0]
    assert hvd.broadcast_object("text", 0) == "text"
    assert int(hvd.broadcast(3 + hvd.rank(), 0, name="epoch")) == 3
    means = hvd.allreduce([1.0 + hvd.rank(), 0.5], name="scores")  # like the values of model.evaluate
    assert keras.ops.convert_to_numpy(means).tolist() == [1.5, 0.5]


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
    [{}, {"backward_passes_per_step": 3, "op": hvd.Sum}, {"op": hvd.Adasum}],
    ids=["plain", "accumulated sum", "adasum"],
)
def test_copies_of_an_optimizer_exchange_gradients_with_its_settings(group, options):
    first, second = group.run(train_with_copies, options)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_copies_of_an_optimizer_keep_its_process_set(group):
    group.run(keep_the_process_set)


def test_the_broadcast_warns_if_a_copied_model_trains_apart(group):
    (message,), none = group.run(warnings_of_training, False)
    assert "does not exchange gradients, so every rank trains a model of its own. Wrap it" in message
    assert not none  # only rank 0 logs it
    assert group.run(warnings_of_training, True) == [[], []]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda x: x.from_config(x.get_config())])
def test_an_optimizer_with_local_variables_is_not_copied(copied):
    model = network()
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.05), local_layers=model.layers[0])
    with pytest.raises(ConfigError, match=r"local variables, which belong to one model\. Wrap a new optimizer"):
        copied(optimizer)


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


def test_adasum_does_not_combine_the_steps_of_local_layers(group):
    first, second = group.run(keep_steps_of_local_layers)
    assert [np.array_equal(one, other) for one, other in zip(first, second, strict=True)] == [False, False, True, True]


def test_gradients_may_be_compressed(group):
    first, second = group.run(compress)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_ranks_of_a_process_set_train_independently(group):
    group.run(train_apart)


def test_all_ranks_start_from_the_root(group, tmp_path):
    group.run(start_from_the_same, str(tmp_path))


def test_ranks_agree_if_the_first_batch_builds_the_model(group):
    first, second = group.run(start_without_variables)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_ranks_train_together_if_one_has_made_more_optimizers_and_layers(group):
    first, second = group.run(train_with_more_objects_on_one_rank)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_metrics_are_averaged(group):
    group.run(average_metrics)


def test_the_learning_rate_warms_up_and_decays(group):
    group.run(warm_up)


def test_the_best_model_is_kept_by_one_rank_and_loads_anywhere(group, tmp_path):
    group.run(keep_the_best, str(tmp_path))


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


def test_collectives_are_those_of_the_backend(group):
    group.run(reduce_eagerly)


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


def test_the_module_exports_the_common_interface_without_duplicates():
    assert set(interface.__all__) < set(hvd.__all__) <= set(dir(hvd))
    assert len(set(hvd.__all__)) == len(hvd.__all__)
    assert all(getattr(hvd, name) is getattr(interface, name) for name in interface.__all__)
    assert all(getattr(hvd, name) is not None for name in hvd.__all__)


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


def test_multi_optimizers_are_rejected():
    layers = network().layers
    several = getattr(keras.optimizers, "MultiOptimizer", None)
    if several is None:
        pytest.skip("this Keras has no MultiOptimizer")
    with pytest.raises(ConfigError, match="MultiOptimizer cannot be distributed"):
        hvd.DistributedOptimizer(several([(keras.optimizers.SGD(), layers)]))


def test_a_local_layer_must_be_built():
    optimizer = keras.optimizers.SGD()
    with pytest.raises(ConfigError, match=r"'dense_later' has no variables before it is built\. Build"):
        hvd.PartialDistributedOptimizer(optimizer, local_layers=keras.layers.Dense(2, name="dense_later"))
    hvd.DistributedOptimizer(optimizer)  # the optimizer is unchanged


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
    assert group.run(average_different_metrics) == [(message, {"loss": 0.5})] * 2
