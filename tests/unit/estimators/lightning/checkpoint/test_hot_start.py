"""Schedules of optimizers that start with the state of earlier optimizers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from sparkhvd.estimators.lightning.checkpoint.hot_start import load_earlier_states


def sequence(optimizer):
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=2), schedules.ExponentialLR(optimizer, 0.5)]
    return schedules.SequentialLR(optimizer, parts, milestones=[2])


def chain(optimizer):
    return schedules.ChainedScheduler([schedules.StepLR(optimizer, 2), schedules.ExponentialLR(optimizer, 0.5)])


MAKERS = {
    "exponential": lambda optimizer: schedules.ExponentialLR(optimizer, 0.5),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 4),
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda epoch: 1.0 / (epoch + 2)),
    "cycle": lambda optimizer: schedules.OneCycleLR(optimizer, 1.0, total_steps=6),
    "sequence": sequence,
    "chain": chain,
    "plateau": lambda optimizer: schedules.ReduceLROnPlateau(optimizer, patience=0),
}


def rates(optimizer, schedule):
    """Return the learning rates of the steps of an epoch."""
    rates_of_steps = []
    for _ in range(4):
        optimizer.step()
        rates_of_steps.append(optimizer.param_groups[0]["lr"])
        schedule.step(*([1.0] if isinstance(schedule, schedules.ReduceLROnPlateau) else []))
    return rates_of_steps


@pytest.mark.parametrize("kind", MAKERS)
def test_a_schedule_starts_as_if_created_for_the_earlier_optimizer(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # created at an optimizer's first step
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    earlier = torch.optim.Adam([weight], lr=0.1)
    rates(earlier, MAKERS[kind](earlier))
    made = torch.optim.Adam([weight], lr=0.1)
    schedule = MAKERS[kind](made)
    load_earlier_states([made], [earlier], [schedule])
    assert torch.equal(made.state[weight]["exp_avg"], earlier.state[weight]["exp_avg"])
    wanted = torch.optim.Adam([weight], lr=0.1)
    wanted.load_state_dict(copy.deepcopy(earlier.state_dict()))
    assert rates(made, schedule) == rates(wanted, MAKERS[kind](wanted))
