"""Resumed runs of KerasEstimator: what they restore, and the differences that the driver refuses."""

from __future__ import annotations

from dataclasses import replace

import keras
import numpy as np
import pytest

from sparkhvd.errors import ParamError
from sparkhvd.estimators.keras.checkpoint.callback_states import changes_model_at_end
from sparkhvd.estimators.keras.plugin import PLUGIN
from sparkhvd.estimators.runs.resume_check import check_resumable, facts_from_json
from sparkhvd.world import World
from tests.unit.estimators.arrays import spec
from tests.unit.estimators.keras.networks import DATA, network, parameters, rows


def test_the_learning_rate_of_a_resumed_run_is_scaled_by_its_ranks():
    def trainer(size):
        return PLUGIN.trainer(PLUGIN.pack(parameters()), spec(DATA, scale_lr=True), replace(World(), size=size))

    first, second = trainer(2), trainer(4)
    first._model.optimizer.build(first._model.trainable_variables)
    assert float(first._model.optimizer.learning_rate) == pytest.approx(0.04)
    first._model.optimizer.learning_rate = 0.01  # like a callback
    second.restore(first.state())
    assert float(second._model.optimizer.learning_rate) == pytest.approx(0.02)


def test_a_resumed_run_normalizes_rows_as_before_although_its_new_model_was_adapted_to_other_rows():
    def trainer(shift):
        normalization = keras.layers.Normalization()
        normalization.adapt(rows(9)["x"] + shift)
        model = keras.Sequential([keras.Input((6,)), normalization, *network().layers])
        return PLUGIN.trainer(PLUGIN.pack(parameters(model=model)), spec(DATA), World())

    first, resumed = trainer(0.0), trainer(2.0)
    first._model.optimizer.build(first._model.trainable_variables)
    resumed.restore(first.state())
    np.testing.assert_array_equal(resumed._model(rows(9)["x"]), first._model(rows(9)["x"]))


def test_a_function_that_a_lambda_callback_calls_at_the_end_is_user_code():
    assert changes_model_at_end(keras.callbacks.LambdaCallback(on_train_end=print))
    assert not changes_model_at_end(keras.callbacks.LambdaCallback(on_train_begin=print))


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({"use_ema": True}, {}, r"has a variable '.*kernel_average', which this fit's optimizer lacks"),
        ({}, {"use_ema": True}, r"lacks the variable '.*kernel_average' of this fit's optimizer"),
        ({"gradient_accumulation_steps": 2}, {"use_ema": True}, "has a variable '.*gradient_accumulator'"),
    ],
)
def test_a_run_is_not_resumed_with_an_optimizer_that_has_other_variables(before, now, message):
    def trainer(**more):
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **more)
        optimizer.build(network().trainable_variables)
        return PLUGIN.trainer(PLUGIN.pack(parameters(optimizer=optimizer)), spec(DATA), World(0, 1))

    first = trainer(**before)
    first.restore(first.state())
    with pytest.raises(ParamError, match=message):
        trainer(**now).restore(trainer(**before).state())


def model_of_dtype(dtype):
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, dtype=dtype)])


def test_a_run_is_not_resumed_with_weights_of_another_type():
    before, now = (PLUGIN.facts(parameters(model=model_of_dtype(dtype))) for dtype in ("float32", "float64"))
    check_resumable("run", "url", before, before)
    with pytest.raises(
        ParamError, match=r"its weight '0: .*kernel' has elements of type float32, but this .* has float64"
    ):
        check_resumable("run", "url", before, now)


def test_a_run_is_not_resumed_with_other_layers_frozen():
    whole, frozen = network(), network()
    frozen.layers[0].trainable = False
    before, now = (PLUGIN.facts(parameters(model=model)) for model in (whole, frozen))
    check_resumable("run", "url", before, before)
    with pytest.raises(
        ParamError, match=r"parameter 0 of group 0 of its optimizer is '0: .*kernel', but of this fit's"
    ):
        check_resumable("run", "url", before, now)


def facts_after_adapting(words, boundaries):
    lookup, bins = keras.layers.StringLookup(max_tokens=4), keras.layers.Discretization(boundaries)
    lookup.adapt(np.array(words))
    first, second = keras.Input((1,), dtype="string"), keras.Input((1,))
    embedded = [keras.layers.Embedding(4, 2)(values) for values in (lookup(first), bins(second))]
    model = keras.Model([first, second], keras.layers.Dense(3)(keras.layers.Concatenate()(embedded)))
    return facts_from_json(PLUGIN.facts(parameters(model=model)).to_json())


def test_a_run_is_not_resumed_with_layers_that_were_adapted_to_other_values():
    before = facts_after_adapting(["a", "b", "b"], [0.0, 1.0])
    check_resumable("run", "url", before, facts_after_adapting(["b", "a", "b"], [0.0, 1.0]))
    check_resumable("run", "url", replace(before, adapted={}), before)  # of a checkpoint of an older version
    for words, boundaries, name in (
        (["a", "a", "b"], [0.0, 1.0], "string_lookup"),
        (["a", "b", "b"], [0.0], "discret"),
    ):
        with pytest.raises(ParamError, match=f"its layer '.*{name}.*' has other words or boundaries than this fit's"):
            check_resumable("run", "url", before, facts_after_adapting(words, boundaries))
