"""A rank's random numbers differ from other ranks' in layers and the backend, but not in NumPy and Python."""

from __future__ import annotations

import random
from dataclasses import replace

import keras
import numpy as np

from sparkhvd.comm import session
from sparkhvd.estimators.keras.checkpoint.arrays import arrays_to_bytes
from sparkhvd.estimators.keras.plugin import PLUGIN
from tests.unit.estimators.arrays import Hooks, spec
from tests.unit.estimators.keras.networks import DATA, PARTIAL_END, parameters, source


def draw_numbers(rank: int, hooks: Hooks, epoch: int = 1) -> dict[str, list[float]]:
    """Return random numbers from the beginning of an epoch and from its first batch, by generator."""
    from sparkhvd.estimators.keras.checkpoint.randomness import RandomStates  # noqa: PLC0415

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5)])
    states = RandomStates(model, spec(DATA), rank, hooks)
    states.begin_epoch(epoch)
    numbers = {"begin": [random.random(), np.random.random()]}
    states.begin_batch()
    return {
        **numbers,
        "common": [random.random(), np.random.random()],
        "own": [
            float(keras.random.uniform(())),
            *map(float, keras.ops.convert_to_numpy(states.variables[0])),
            *_drawn_by_operations(),
        ],
    }


def _drawn_by_operations() -> list[float]:
    """Return a number from an operation with a random generator of its own; none on a backend without them."""
    if keras.config.backend() != "tensorflow":
        return []
    import tensorflow as tf  # noqa: PLC0415

    return [float(tf.random.uniform(())), float(tf.function(tf.random.uniform)(()))]


def test_ranks_that_resume_an_epoch_of_others_do_not_draw_their_numbers_again(group):
    whole, again, later = zip(*group.run(numbers_of_three_epochs), strict=True)
    assert whole[0]["begin"] == again[0]["begin"] == later[1]["begin"], "callbacks may set rates with them"
    for one in (whole, again, later):
        assert one[0]["common"] == one[1]["common"]
        assert set(one[0]["own"]).isdisjoint(one[1]["own"])
    all_draws = [draws for one in (whole, again, later) for draws in (one[0]["common"], one[0]["own"], one[1]["own"])]
    assert len({number for draws in all_draws for number in draws}) == sum(map(len, all_draws))


def numbers_of_three_epochs() -> list[dict[str, list[float]]]:
    """Return the numbers of this rank in a whole epoch, and in the rest of an epoch after 3 and after 4 steps."""
    rank = session.current().world.rank
    return [draw_numbers(rank, Hooks(first_epoch=1, steps_done=steps)) for steps in (0, 3, 4)]


def test_ranks_that_resume_their_own_epoch_continue_with_their_numbers(group):
    for undisturbed, resumed in group.run(undisturbed_and_resumed):
        assert undisturbed == resumed


def undisturbed_and_resumed() -> tuple[list[float], list[float]]:
    """Return the numbers of the second batch of an epoch, without and after an interruption."""
    from sparkhvd.estimators.keras.checkpoint.randomness import RandomStates  # noqa: PLC0415

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5)])

    def numbers() -> list[float]:
        return [random.random(), np.random.random(), float(keras.random.uniform(()))]

    states = RandomStates(model, spec(DATA), 1, Hooks())
    states.begin_epoch(0)
    states.begin_batch()
    numbers()
    saved = arrays_to_bytes(states.state())
    expected = numbers()
    resumed = RandomStates(model, spec(DATA), 1, Hooks(steps_done=1, rank_state=saved))
    resumed.begin_epoch(0)
    resumed.begin_batch()
    return expected, numbers()


def test_a_training_takes_a_seed_that_numpy_does_not_take(group):
    assert all(group.run(learns_with_a_long_seed))


def learns_with_a_long_seed() -> bool:
    """Return whether a training with a seed of more than 32 bits changes the weights."""
    world, params = session.current().world, parameters()
    before = params["model"].get_weights()
    trainer = PLUGIN.trainer(PLUGIN.pack(params), replace(spec(DATA), seed=2**62), world)
    trainer.fit(source(PARTIAL_END, world.rank), None, Hooks())
    return not np.array_equal(trainer._model.get_weights()[0], before[0])
