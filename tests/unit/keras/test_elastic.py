"""The state of an elastic Keras training, and its callbacks, in one rank; ``tests/launch`` loses ranks."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import sparkhvd.keras as hvd
from sparkhvd.errors import ConfigError, MismatchError
from tests.unit.keras.networks import fitted, network, rows


def follow_a_new_optimizer():
    """The state has the variables of the optimizer that the model was last compiled with."""
    model = network(seed=hvd.rank())
    part = slice(hvd.rank(), None, 2)
    first = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05))
    fitted(model, first, part, 8)
    state = hvd.elastic.KerasState(model)
    second = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    fitted(model, second, part, 8)
    assert state.optimizer is model.optimizer is second
    second.learning_rate = 0.1 + hvd.rank()
    state.sync()
    values = [np.array(keras.ops.convert_to_numpy(one)) for one in second.variables]
    ranks = hvd.allgather_object(values)
    assert all(np.array_equal(*pair) for pair in zip(*ranks, strict=True))
    fitted(model, second, part, 8)
    state.restore()
    for value, one in zip(values, second.variables, strict=True):
        np.testing.assert_array_equal(value, keras.ops.convert_to_numpy(one))


def return_to_the_optimizer_of_the_commit():
    model = network()
    part = slice(hvd.rank(), None, 2)
    first = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05))
    fitted(model, first, part, 8)
    state = hvd.elastic.KerasState(model)
    model.fit(*rows_of(part), verbose=0, shuffle=False)
    expected = [np.array(one) for one in model.get_weights()]
    state.restore()
    fitted(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), part, 8)
    state.restore()
    assert state.optimizer is model.optimizer is first
    state.sync()
    model.fit(*rows_of(part), verbose=0, shuffle=False)
    for value, weight in zip(expected, model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, weight)


def synchronize_different_optimizers():
    """Rank 0 has replaced the optimizer with which a new rank still starts."""
    model = network()
    model.compile(hvd.DistributedOptimizer([keras.optimizers.Adam, keras.optimizers.SGD][hvd.rank()](0.05)), "mse")
    with pytest.raises(MismatchError) as caught:
        hvd.elastic.KerasState(model).sync()
    return str(caught.value)


def rows_of(part):
    features, targets = rows()
    return features[part], targets[part]


def test_a_state_follows_the_optimizer_of_its_model(group):
    group.run(follow_a_new_optimizer)


def test_ranks_with_different_optimizers_do_not_wait_for_each_other(group):
    for message in group.run(synchronize_different_optimizers):
        assert "only rank 0 has the optimizer Adam, a variable of float32" in message
        assert "only rank 1 has the optimizer SGD. " in message


def test_a_restore_returns_to_the_optimizer_of_the_commit(group):
    group.run(return_to_the_optimizer_of_the_commit)


def test_an_optimizer_of_its_own_stays_that_of_the_state(alone):
    model, own = network(), keras.optimizers.SGD(0.1)
    model.compile(keras.optimizers.Adam(0.1), "mse")
    state = hvd.elastic.KerasState(model, own)
    model.compile(keras.optimizers.Nadam(0.1), "mse")
    state.restore()
    assert state.optimizer is own
    assert type(model.optimizer).__name__ == "Nadam"


def test_a_commit_of_another_optimizer_says_what_to_do(alone):
    model, fresh = network(), network()
    model.compile(keras.optimizers.Adam(0.1), "mse")
    content = hvd.elastic.KerasState(model).dump_commit()
    message = r"The commit has 14 variables, but the model and optimizer have 4\. Build and compile the model as it"
    with pytest.raises(ConfigError, match=message):
        hvd.elastic.KerasState(fresh).load_commit(content)


def test_a_commit_is_loaded_into_a_model_that_was_compiled_after_its_state_was_made(alone):
    model, fresh = network(), network()
    model.compile(keras.optimizers.Adam(0.1), "mse")
    state = hvd.elastic.KerasState(fresh)
    fresh.compile(keras.optimizers.Adam(0.1), "mse")
    fresh.optimizer.build(fresh.trainable_variables)
    optimizer = fresh.optimizer
    state.load_commit(hvd.elastic.KerasState(model).dump_commit())
    assert fresh.optimizer is optimizer
    for value, expected in zip(fresh.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize(("together", "commits"), [(1, [3, 6, 9, 12]), (2, [4, 6, 10, 12]), (5, [5, 6, 11, 12])])
def test_commits_count_batches_that_keras_runs_together(alone, together, commits):
    model, seen = network(), []
    model.compile("sgd", "mse", steps_per_execution=together)

    class Counting(hvd.elastic.State):
        def commit(self):
            seen.append(int(model.optimizer.iterations))

    callback = hvd.elastic.CommitStateCallback(Counting(), 3)
    model.fit(*rows(), batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
    assert seen == commits, "every third batch, and the last of an epoch"


def commit_and_train():
    """Commits reuse their memory, and neither training nor a restore changes them."""
    model = network()
    part = slice(None)
    fitted(model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), part, 8)
    state = hvd.elastic.KerasState(model)
    addresses = [value.ctypes.data for value in state._saved_variables]
    for _ in range(2):
        model.fit(*rows_of(part), verbose=0, shuffle=False)
        state.commit()
        expected = [np.array(keras.ops.convert_to_numpy(one)) for one in state._saved_variables]
        for _ in range(2):
            model.fit(*rows_of(part), verbose=0, shuffle=False)
            state.restore()
            for value, weight in zip(expected, model.get_weights(), strict=False):
                np.testing.assert_array_equal(value, weight)
    assert [value.ctypes.data for value in state._saved_variables] == addresses


def test_commits_reuse_their_memory_and_training_does_not_change_them(alone):
    commit_and_train()


def test_a_single_bfloat16_is_committed_and_restored(alone):
    model = network()
    model.factor = keras.Variable(2.0, dtype="bfloat16")
    state = hvd.elastic.KerasState(model)
    model.factor.assign(3.0)
    state.commit()
    model.factor.assign(4.0)
    state.restore()
    assert float(model.factor) == 3.0
