"""NaN and infinite losses are reported in every batch and epoch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sparkhvd.errors import DataError
from sparkhvd.estimators.reports import EpochReport
from sparkhvd.estimators.torch.plugin import PLUGIN
from sparkhvd.estimators.training.hooks import RunHooks
from tests.unit.estimators.arrays import ArraySource, Hooks, schema, spec

DATA = schema(x=("feature", "float64", (2,), "array"), y=("label", "float64", (1,), "array"))


def by_function(model, optimizer, transform, loss_fn, inputs, labels, weights, passes, index):  # noqa: PLR0917
    loss = loss_fn(*transform(model(*inputs), labels))
    loss.backward()
    if (index + 1) % passes == 0:
        optimizer.step()
    return model(*inputs), loss


@pytest.mark.parametrize("function", [None, by_function])
def test_a_nan_or_infinite_loss_of_a_batch_is_reported_even_if_another_batch_follows_in_its_step(alone, function):
    model = torch.nn.Linear(2, 1)
    params = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.0), "label_cols": ("y",)}
    params = {**params, "loss": torch.nn.functional.mse_loss, "train_minibatch_fn": function, "schema": DATA}
    trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(DATA, backward_passes_per_step=2), alone.world)
    x = np.array([[1.0, 2.0], [math.nan, 1.0], [2.0, 1.0], [1.0, 1.0]])
    rows, hooks = ArraySource(DATA, {"x": x, "y": np.ones((4, 1))}, [[0, 1], [2, 3]], [2, 2]), Hooks()
    trainer.fit(rows, None, hooks)
    assert [math.isnan(report.loss) for report in hooks.steps] == [True]


def test_the_loss_of_an_epoch_can_end_the_training_and_a_missing_loss_causes_no_warning(alone, caplog):
    strict = RunHooks(None, "r", spec(DATA, terminate_on_nan=True), alone)
    with pytest.raises(DataError, match="The loss of epoch 1 of 1 is inf, and terminate_on_nan is set"):
        strict.on_epoch_end(EpochReport(0, {"loss": (math.inf, 1)}), None)
    RunHooks(None, "r", spec(DATA, terminate_on_nan=True), alone).on_epoch_end(EpochReport(0, {"loss": (0.0, 0)}), None)
    assert caplog.messages == []
