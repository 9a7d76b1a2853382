from __future__ import annotations

import copy
import gc

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.comm import session
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.errors import ConfigError, MismatchError
from tests.ranks import RankGroup


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def group(request):
    with RankGroup(request.param, imports=("torch", "sparkhvd.torch", "torch.optim")) as started:
        yield started


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum and decay": lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}
# The number of rows of every rank in each step of a run; runs with two ranks ignore the third.
EVEN = [(4, 4, 4)] * 20
UNEVEN = [(5, 3, 1), (1, 7, 2), (4, 4, 4), (6, 1, 9)] * 5
SOME_EMPTY = [(5, 0, 1), (0, 7, 0), (4, 4, 4), (3, 2, 0)] * 5


class Network(torch.nn.Module):
    """A network with a layer that only some steps use, and one that no step uses; weight decay applies to both."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 16)
        self.second = torch.nn.Linear(16, 3)
        self.sometimes = torch.nn.Linear(16, 3)
        self.never = torch.nn.Linear(4, 4)

    def forward(self, x, detour=False):
        hidden = torch.tanh(self.first(x))
        return self.second(hidden) + (self.sometimes(hidden) if detour else 0.0)


def network():
    torch.manual_seed(7)
    return Network().double()


def rows_of_step(step, rows):
    torch.manual_seed(1000 + step)
    return torch.randn(rows, 6).double(), torch.randn(rows, 3).double()


def loss_of(model, features, labels, step):
    return torch.nn.functional.mse_loss(model(features, detour=step % 3 == 0), labels)


def parameters_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def state_of(optimizer, model):
    """Return which parameters have a state: a parameter without a gradient must have none."""
    return [bool(optimizer.state.get(parameter)) for parameter in model.parameters()]


# Functions that the ranks run. `plain` is one process on the whole batch.


def train_plain(kind, plan, passes=1):
    """Train one process on all rows of every step at once."""
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(len(plan) // passes):
        rows = sum(sum(plan[step * passes + i][: hvd.size()]) for i in range(passes))
        features, labels = rows_of_step(step, rows)
        optimizer.zero_grad()
        loss_of(model, features, labels, step).backward()
        optimizer.step()
    return parameters_of(model), state_of(optimizer, model)


def train_weighted(kind, plan, passes=1):
    """Train every rank on its rows of every pass of every step."""
    model = network()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters()), model.named_parameters(), backward_passes_per_step=passes
    )
    for step in range(len(plan) // passes):
        shards = [plan[step * passes + i][: hvd.size()] for i in range(passes)]
        rows = sum(map(sum, shards))
        features, labels = rows_of_step(step, rows)
        optimizer.zero_grad()
        start = 0
        for shard in shards:
            mine = slice(start + sum(shard[: hvd.rank()]), start + sum(shard[: hvd.rank() + 1]))
            start += sum(shard)
            if shard[hvd.rank()]:
                optimizer.weight_next(shard[hvd.rank()] / rows)
                loss_of(model, features[mine], labels[mine], step).backward()
            else:
                optimizer.contribute_nothing()
        optimizer.step()
    return parameters_of(model), state_of(optimizer, model)


def compare(kind, plan, passes=1):
    want, want_states = train_plain(kind, plan, passes)
    got, got_states = train_weighted(kind, plan, passes)
    return ((got - want).norm() / want.norm()).item(), want_states == got_states, got


def average_without_weights():
    """Train like Horovod, with the mean of the ranks' gradients, over equal shards."""
    model = network()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["Adam"](model.parameters()), model.named_parameters())
    for step in range(10):
        features, labels = rows_of_step(step, 4 * hvd.size())
        mine = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
        optimizer.zero_grad()
        loss_of(model, features[mine], labels[mine], step).backward()
        optimizer.step()
    want, _ = train_plain("Adam", [(4, 4, 4)] * 10)
    return ((parameters_of(model) - want).norm() / want.norm()).item()


def gradient_with(steps=1, **options):
    """Return the combined gradient after passes with the gradient r + 1 on rank r."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), **options)
    for _ in range(steps):
        (weight.sum() * (hvd.rank() + 1)).backward()
    optimizer.synchronize()
    return weight.grad.tolist()


def train_with_closure():
    model = network()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum and decay"](model.parameters()))
    for step in range(5):
        features, labels = rows_of_step(step, 4 * hvd.size())
        mine = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)

        def closure(step=step, features=features[mine], labels=labels[mine]):
            optimizer.zero_grad()
            loss = loss_of(model, features, labels, step)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
    want, _ = train_plain("momentum and decay", [(4, 4, 4)] * 5)
    return ((parameters_of(model) - want).norm() / want.norm()).item()


def clip_between():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    moved = []
    for explicit in (True, False):
        optimizer.zero_grad()
        (weight.sum() * 100).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        before = weight.detach().clone()
        if explicit:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()  # does not exchange synchronized gradients again
        moved.append((before - weight.detach()).norm().item())
    return moved


def freeze_and_thaw():
    """Change between steps, on all ranks, which parameters require a gradient."""
    model = network()
    for parameter in model.first.parameters():
        parameter.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    frozen = model.first.weight.detach().clone()
    changed = []
    for thawed in (False, True):
        for parameter in model.first.parameters():
            parameter.requires_grad_(thawed)
        for parameter in model.second.parameters():
            parameter.requires_grad_(not thawed)
        optimizer.zero_grad()
        before = model.second.weight.detach().clone()
        model(torch.ones(2, 6).double() * (hvd.rank() + 1)).square().sum().backward()
        optimizer.step()
        changed.append((not torch.equal(frozen, model.first.weight), not torch.equal(before, model.second.weight)))
    return changed, parameters_of(model)


def exchange_odd_gradients():
    """Exchange gradients in channels_last order, of bfloat16, of a scalar, of no elements, and one set by hand."""
    model = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    half = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    scalar = torch.nn.Parameter(torch.tensor(1.0))
    empty = torch.nn.Parameter(torch.zeros(0, 3))
    by_hand = torch.nn.Parameter(torch.zeros(2))
    parameters = [*model.parameters(), half, scalar, empty, by_hand]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum)
    images = torch.arange(32.0).reshape(2, 2, 2, 4).to(memory_format=torch.channels_last)
    (model(images).sum() * (hvd.rank() + 1) + half.sum() * (hvd.rank() + 1) + scalar**2 + empty.sum()).backward()
    by_hand.grad = torch.full((2,), float(hvd.rank()))
    optimizer.synchronize()
    reference = torch.nn.Conv2d(2, 3, 2)
    reference(images).sum().backward()
    total = hvd.size() * (hvd.size() + 1) / 2
    torch.testing.assert_close(model.weight.grad, reference.weight.grad * total, rtol=1e-6, atol=0)
    assert half.grad.tolist() == [total] * 5
    assert scalar.grad.item() == 2.0 * hvd.size()
    assert by_hand.grad.tolist() == [total - hvd.size()] * 2


def mix_weighted_and_plain():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("the weight", weight)])
    if hvd.rank() == 0:
        optimizer.weight_next(0.5)
    weight.sum().backward()
    with pytest.raises(MismatchError) as caught:
        optimizer.step()
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == [-1.0, -1.0], "after the error a plain step works"
    return str(caught.value)


def use_gradients_in_reverse():
    """Compute gradients in a different order on every rank; they are matched by name."""
    parameters = [torch.nn.Parameter(torch.zeros(10)) for _ in range(8)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum)
    order = parameters if hvd.rank() == 0 else parameters[::-1]
    for scale, parameter in enumerate(order):
        (parameter.sum() * (scale + 1)).backward()
    optimizer.step()
    return [parameter[0].item() for parameter in parameters]


def list_parameters_in_another_order(shift):
    """Return gradients of steps in which each parameter is used by at most one rank."""
    named = [(name, torch.nn.Parameter(torch.zeros(1))) for name in ("first", "second", "third", "unused")]
    by_name = dict(named)
    if hvd.rank():
        named = named[shift:] + named[:shift] if shift else [named[0], *named[:0:-1]]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([one for _, one in named], lr=1.0), named)
    optimizer.zero_grad()
    (by_name["second" if hvd.rank() == 0 else "first"] * hvd.size()).sum().backward()
    optimizer.step()
    return {name: None if one.grad is None else one.grad.item() for name, one in by_name.items()}


# The expected results.
