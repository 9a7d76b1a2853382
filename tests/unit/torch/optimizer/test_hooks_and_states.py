"""Hooks of steps, schedulers and states of a distributed optimizer."""

from __future__ import annotations

import copy

import pytest
import torch

import sparkhvd.torch as hvd
from tests.ranks import TORCH, RankGroup


@pytest.fixture(scope="module")
def group():
    with RankGroup(2, imports=TORCH) as started:
        yield started


@pytest.fixture(params=[hvd.Average, hvd.Adasum], ids=str)
def op(request):
    return request.param


def count_hooks(op, reload):
    """Return the weights seen by hooks before and after the steps, and the last weight."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=op)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(("before", weight.item())))
    optimizer.register_step_post_hook(lambda *_: seen.append(("after", weight.item())))
    if reload == "load":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif reload == "broadcast":
        hvd.broadcast_optimizer_state(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        (weight * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
    return seen


@pytest.mark.parametrize("reload", ["", "load", "broadcast"])
def test_hooks_run_once_per_step_and_see_the_step_of_all_ranks(group, op, reload):
    seen = [("before", 0.0), ("after", -1.5), ("before", -1.5), ("after", -3.0)]
    assert group.run(count_hooks, op, reload) == [seen] * 2


def clip_in_a_hook():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_value_([weight], 1.0))
    optimizer.load_state_dict(optimizer.state_dict())
    (weight * (2.0 * hvd.rank())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    (weight * (5.0 + hvd.rank())).sum().backward()
    optimizer.step()
    return weight.item()


def test_a_hook_clips_the_gradient_of_all_ranks(group):
    assert group.run(clip_in_a_hook) == [-2.0] * 2


def step_during_backward(wraps_first):
    """Return the weights after steps that a hook takes as soon as each gradient is computed."""
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizers = {}

    def take_step(weight):
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    def add_hooks():
        for weight in weights:
            weight.register_post_accumulate_grad_hook(take_step)

    if not wraps_first:
        add_hooks()
    for index, weight in enumerate(weights):
        optimizer = torch.optim.SGD([weight], lr=1.0)
        optimizers[weight] = hvd.DistributedOptimizer(optimizer, [(f"weight.{index}", weight)])
    if wraps_first:
        add_hooks()
    for _ in range(3):
        sum(weight * (index + hvd.rank()) for index, weight in enumerate(weights)).sum().backward()
    return [weight.item() for weight in weights]


@pytest.mark.parametrize("wraps_first", [True, False])
def test_a_hook_takes_the_step_of_each_parameter_during_backward(group, wraps_first):
    assert group.run(step_during_backward, wraps_first) == [[-1.5, -4.5, -7.5]] * 2


@pytest.mark.usefixtures("alone")
def test_shares_of_several_passes_hold_after_the_model_has_changed_its_type():
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), backward_passes_per_step=2)
    for change in (model.double, lambda: model.float().double()):  # the second one ends with the same type
        change()
        optimizer.zero_grad()
        for share in (0.25, 0.75):
            optimizer.weight_next(share)
            (model(torch.ones(1, 3).double()) * 2.0).sum().backward()
        optimizer.synchronize()
        assert model.weight.grad.tolist() == [[2.0] * 3]


def schedule_from_before(op):
    weight = torch.nn.Parameter(torch.zeros(1))
    original = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(original, 0.5)
    optimizer = hvd.DistributedOptimizer(original, op=op)
    if hvd.rank() == 0:
        optimizer.param_groups[0]["lr"] = 0.25
    hvd.broadcast_optimizer_state(optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(2):
        weight.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates, len(original.state), weight.item()


def test_a_scheduler_of_the_original_optimizer_works_after_a_broadcast(group, op):
    first, second = group.run(schedule_from_before, op)
    assert first == second
    assert first[:2] == ([0.25, 0.125, 0.0625], 1)


class Precise(torch.optim.Optimizer):
    """Keeps a state in single precision, whatever the precision of its parameters."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("sum", torch.zeros_like(parameter, dtype=torch.float32)).add_(parameter.grad.float())
            parameter.sub_(state["sum"].to(parameter.dtype))


def broadcast_a_precise_state():
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = Precise([weight])
    if hvd.rank() == 0:
        weight.grad = torch.full((3,), 1.0, dtype=torch.bfloat16)
        optimizer.step()
        optimizer.state[weight]["sum"].fill_(1.0009765625)
    hvd.broadcast_optimizer_state(optimizer)
    return str(optimizer.state[weight]["sum"].dtype), optimizer.state[weight]["sum"].tolist()


def test_a_broadcast_state_has_the_dtype_of_the_root(group):
    assert group.run(broadcast_a_precise_state) == [("torch.float32", [1.0009765625] * 3)] * 2


def combine_a_channels_last_step():
    torch.manual_seed(1)
    convolution = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(convolution.parameters(), lr=0.5), op=hvd.Adasum)
    before = convolution.weight.detach().clone()
    convolution(torch.ones(1, 3, 4, 4)).sum().backward()
    gradient = convolution.weight.grad.clone()
    optimizer.step()
    torch.testing.assert_close(convolution.weight.detach(), before - 0.5 * gradient)
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)


def test_adasum_combines_steps_of_any_memory_format(group):
    group.run(combine_a_channels_last_step)
