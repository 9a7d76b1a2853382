"""Gradients whose memory other tensors use, and gradients that autograd returns instead of accumulating them."""

from __future__ import annotations

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.torch.ops import transfer
from tests.ranks import TORCH, RankGroup


@pytest.fixture(scope="module")
def group():
    with RankGroup(2, imports=TORCH) as started:
        yield started


def inputs(size, rows=2):
    """Return the rows of all ranks; each rank has one row."""
    torch.manual_seed(5)
    return torch.randn(rows, size, dtype=torch.float64)


class Offset(torch.nn.Module):
    """Adds a view of a parameter to activations: autograd gives it a view of their gradient, which ``net`` needs."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(6, 400)
        self.offset = torch.nn.Parameter(torch.randn(400))

    def forward(self, x):
        return (self.net(x) + self.offset.unsqueeze(0)).pow(3).sum(1)


class SharedByTwo(torch.nn.Module):
    """Two parameters, whose gradients are views of the same gradient."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (torch.nn.Parameter(torch.randn(200, 3)) for _ in range(2))

    def forward(self, x):
        return (self.one.view(-1) + self.other.view(-1)).pow(2).sum() * x.sum(1)


class Concatenated(torch.nn.Module):
    """Parameters whose gradients are parts of one gradient, which share its count of changes."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(2, 6)) for _ in range(3))

    def forward(self, x):
        return torch.nn.functional.linear(x, torch.cat(list(self.parts))).tanh().sum(1)


class Penalized(torch.nn.Module):
    """A penalty of the gradient with respect to the parameters."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))

    def forward(self, x):
        losses = self.net(x).pow(2).sum(1)
        slopes = torch.autograd.grad(losses.sum(), list(self.net.parameters()), create_graph=True)
        return losses + sum(slope.pow(2).sum() for slope in slopes)


MODELS = {model.__name__: model for model in (Offset, SharedByTwo, Concatenated, Penalized)}


def trained(model, x, optimizer, steps=3):
    for step in range(steps):
        # Keeping two gradients in shared memory would double them, even in one process.
        optimizer.zero_grad(set_to_none=step % 2 == 0 or isinstance(model, SharedByTwo))
        model(x).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def model_of(name):
    torch.manual_seed(1)
    return MODELS[name]().double()


def train(name, options):
    model = model_of(name)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), **options)
    return trained(model, inputs(6)[hvd.rank() :][:1], optimizer)


@pytest.mark.parametrize("options", [{}, {"op": hvd.Sum}, {"groups": 1}], ids=["average", "sum", "group"])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_train_like_one_process_even_if_gradients_share_memory(group, name, options):
    model = model_of(name)
    rate = 2e-3 if options.get("op") is hvd.Sum else 1e-3
    if name == "Penalized":  # the penalty is not a mean over rows
        x = inputs(6)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(3):
            optimizer.zero_grad()
            (sum(model(row[None]).mean() for row in x) / 2).backward()
            optimizer.step()
        alone = [parameter.detach() for parameter in model.parameters()]
    else:
        alone = trained(model, inputs(6), torch.optim.SGD(model.parameters(), lr=rate))
    for together in group.run(train, name, options):
        for one, other in zip(together, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def train_with_a_flat_buffer():
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    flat = torch.zeros(6)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    for index, parameter in enumerate(parameters):
        parameter.grad = flat[3 * index : 3 * index + 3]
    sum((hvd.rank() + 1.0) * parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    return flat.tolist(), parameters[1].tolist()


def test_gradients_in_a_flat_buffer_of_the_user_are_exchanged_there(group):
    assert group.run(train_with_a_flat_buffer) == [([1.5] * 6, [-1.5] * 3)] * 2


def test_a_change_of_a_gradient_in_shared_memory_during_the_exchange_is_detected(alone):
    weight, flat = torch.nn.Parameter(torch.ones(2)), torch.zeros(4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    weight.grad = flat[:2]
    weight.sum().backward()
    flat.add_(1.0)
    with pytest.raises(AssertionError, match="was changed in place"):
        optimizer.step()


def test_ordinary_gradients_are_exchanged_without_a_copy(alone, monkeypatch):
    shared = []
    monkeypatch.setattr(
        transfer, "_shares_memory", lambda gradient, real=transfer._shares_memory: shared.append(real(gradient))
    )
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(16, 4)).pow(2).mean().backward()
        optimizer.step()
    assert len(shared) == 12
    assert not any(shared)


def train_without_a_count(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch._C, "_storage_Use_Count")
        return train(name, {})


def test_with_a_pytorch_that_does_not_count_uses_of_memory_copies_are_sent(group):
    expected = group.run(train, "Offset", {})
    for together, other in zip(group.run(train_without_a_count, "Offset"), expected, strict=True):
        for one, two in zip(together, other, strict=True):
            assert torch.equal(one, two)


def gradients_between(when):
    """Compute gradients by ``torch.autograd.grad``, without a backward pass, between the parts of a step."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    weight.sum().backward()
    if when == "after synchronize":
        optimizer.synchronize()
    (slope,) = torch.autograd.grad((weight * 3).sum(), weight)
    optimizer.step()
    return slope.tolist(), weight.tolist()


@pytest.mark.parametrize("when", ["after backward", "after synchronize"])
def test_autograd_grad_does_not_affect_the_step(group, when):
    assert group.run(gradients_between, when) == [([3.0] * 2, [-1.0] * 2)] * 2


def accumulate_with_gradients_between():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=2)
    for _ in range(2):
        optimizer.weight_next(0.25)
        (slope,) = torch.autograd.grad((weight * 2).sum(), weight)
        assert slope.tolist() == [2.0, 2.0]
        (weight * 8).sum().backward()
    optimizer.step()
    return weight.tolist()


def test_autograd_grad_is_not_weighted(group):
    assert group.run(accumulate_with_gradients_between) == [[-8.0] * 2] * 2


def penalize_gradients():
    """Train with the penalty of the gradient of a backward pass, and then differentiate the averaged gradient."""
    weight = torch.nn.Parameter(torch.full((2,), 3.0 + hvd.rank()))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=2)
    with pytest.warns(UserWarning, match="create_graph=True"):
        weight.pow(3).sum().backward(create_graph=True)
    weight.grad.sum().backward()
    optimizer.synchronize()
    return weight.grad.requires_grad, weight.grad.tolist()


def test_averaged_gradients_have_no_graph_because_it_would_be_that_of_one_rank(group):
    mean = sum(3 * value**2 + 6 * value for value in (3.0, 4.0)) / 2
    assert group.run(penalize_gradients) == [(False, [mean] * 2)] * 2
