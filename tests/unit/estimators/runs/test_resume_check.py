"""The check that a run can be resumed with the model and optimizer of a fit."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision

from sparkhvd.errors import ParamError
from sparkhvd.estimators.lightning.plugin import PLUGIN as LIGHTNING
from sparkhvd.estimators.params.policies import Checkpoints
from sparkhvd.estimators.runs.resume_check import ModelFacts, check_resumable, facts_from_json, measures_digest
from sparkhvd.estimators.torch.plugin import PLUGIN as TORCH


def facts(choose, plugin=TORCH, dtype=torch.float32, **more):
    """Return the facts of two equal layers and their optimizer; ``choose`` selects its parameters from theirs."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(dtype)
    optimizer = torch.optim.SGD(choose([*model.parameters()]), 0.1)
    others = {"loss": torch.nn.functional.mse_loss, "logger": None, "checkpoints": Checkpoints()}
    return plugin.facts({"model": model, "optimizer": optimizer, **others, **more})


def in_order(parameters):
    return parameters


def as_groups(parameters):
    return [{"params": parameters[:2]}, {"params": parameters[2:]}]


def layers_reversed(parameters):
    return parameters[2:] + parameters[:2]


def first_layer(parameters):
    return parameters[:2]


@pytest.mark.parametrize("plugin", [TORCH, LIGHTNING])
@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (in_order, layers_reversed, "parameter 0 of group 0 of its optimizer is '0.weight', but of this fit's '1.wei"),
        (in_order, first_layer, "parameter 2 of group 0 of its optimizer is '1.weight', but this fit's has no such"),
        (first_layer, in_order, "its optimizer has no parameter 2 of group 0, but this fit's has '1.weight' there"),
        (in_order, as_groups, "its optimizer has 1 parameter group, but this fit's has 2"),
        (as_groups, in_order, "its optimizer has 2 parameter groups, but this fit's has 1"),
    ],
)
def test_a_run_is_not_resumed_with_an_optimizer_that_trains_other_parameters(plugin, before, now, message):
    with pytest.raises(ParamError, match=message):
        check_resumable("run", "url", facts(before, plugin), facts(now, plugin))


@pytest.mark.parametrize("plugin", [TORCH, LIGHTNING])
def test_a_run_is_not_resumed_with_parameters_of_another_type(plugin):
    before, now = facts(in_order, plugin), facts(in_order, plugin, torch.float64)
    with pytest.raises(
        ParamError,
        match=r"its weight '0.weight' has elements of type float32, but this fit's model has float64 \(and 3",
    ):
        check_resumable("run", "url", before, now)
    saved = before.to_json()
    del saved["dtypes"]
    check_resumable("run", "url", facts_from_json(saved), now)


@pytest.mark.parametrize(
    ("trainer_args", "dtype"),
    [
        ({"precision": "64-true"}, torch.float64),
        ({"precision": 64}, torch.float64),
        ({"precision": "bf16-true"}, torch.bfloat16),
        ({"plugins": DoublePrecision()}, torch.float64),
        ({"plugins": [HalfPrecision("16-true")]}, torch.float16),
    ],
)
def test_a_lightning_run_counts_the_type_that_the_precision_gives_to_parameters(trainer_args, dtype):
    converted = facts(in_order, LIGHTNING, trainer_args=trainer_args)
    check_resumable("run", "url", converted, facts(in_order, LIGHTNING, dtype))
    check_resumable("run", "url", facts(in_order, LIGHTNING, dtype, trainer_args=trainer_args), converted)
    with pytest.raises(ParamError, match=f"has elements of type float32, but this fit's model has {str(dtype)[6:]}"):
        check_resumable("run", "url", facts(in_order, LIGHTNING), converted)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", None])
def test_a_lightning_run_resumes_with_another_precision_that_keeps_the_parameters(precision):
    mixed = facts(in_order, LIGHTNING, trainer_args={"precision": precision})
    check_resumable("run", "url", facts(in_order, LIGHTNING), mixed)


def test_a_run_resumes_with_the_same_parameters_and_from_checkpoints_without_their_names():
    current = facts(as_groups)
    saved = json.loads(json.dumps(current.to_json()))
    assert facts_from_json(saved) == current
    check_resumable("run", "url", facts_from_json(saved), current)
    check_resumable("run", "url", facts_from_json({**saved, "groups": []}), current)
    del saved["groups"]
    check_resumable("run", "url", facts_from_json(saved), current)


def test_facts_name_the_parameters_outside_the_model():
    before, now = (ModelFacts("PyTorch", "SGD", groups=((name,),)) for name in ("", "weight"))
    with pytest.raises(ParamError, match="of its optimizer is 'outside the model', but of this fit's 'weight'"):
        check_resumable("run", "url", before, now)


def absolute_error(output, label):
    return torch.nn.functional.l1_loss(output, label)


@pytest.mark.parametrize(
    "now", [{"loss": torch.nn.functional.l1_loss}, {"metrics": {"mae": absolute_error}}, {"loss_weights": [2.0]}]
)
def test_an_interrupted_epoch_is_not_resumed_with_another_loss_or_other_metrics(now):
    began = {"loss": torch.nn.functional.mse_loss, "metrics": None, "loss_weights": None}
    before = ModelFacts("torch", measures=measures_digest(began))
    after = ModelFacts("torch", measures=measures_digest({**began, **now}))
    saved = facts_from_json(json.loads(json.dumps(before.to_json())))
    check_resumable("run", "url", saved, before, interrupted_epoch=1)
    check_resumable("run", "url", saved, after, interrupted_epoch=None)
    with pytest.raises(ParamError, match="'run' was interrupted within epoch 2, where its loss or its metrics"):
        check_resumable("run", "url", saved, after, interrupted_epoch=1)


def penalized(power):
    """Return the measures of a loss with a penalty on the weight of a new model."""
    model = torch.nn.Linear(2, 2)
    weight = model.weight

    def loss(output, label):
        return (output - label).square().mean() + 0.1 * weight.abs().pow(power).sum()

    return measures_digest({"model": model, "loss": loss})


def test_a_loss_may_refer_to_a_weight_of_the_model_whose_initial_values_differ():
    assert penalized(1) == penalized(1) != penalized(2)


def test_a_loss_is_compared_even_if_the_model_cannot_be_described():
    model = torch.nn.Linear(2, 2)
    model.lock = threading.Lock()
    assert (
        len({measures_digest({"model": model, "loss": torch.nn.MSELoss(reduction=how)}) for how in ("sum", "mean")})
        == 2
    )


def test_a_metric_of_unknown_content_does_not_prevent_a_resumption():
    unknown = ModelFacts("torch", measures=measures_digest({"metrics": [threading.Lock()]}))
    assert not unknown.measures
    check_resumable("run", "url", ModelFacts("torch", measures="of another loss"), unknown, interrupted_epoch=1)
