from __future__ import annotations

import pytest
import torch

import sparkhvd.torch as hvd
from tests.ranks import TORCH, RankGroup

RANKS = 2


@pytest.fixture(scope="module")
def group():
    with RankGroup(RANKS, imports=TORCH) as started:
        yield started


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def adasum(first, second):
    """Compute Adasum of two vectors by its definition."""
    product = (first * second).sum()
    a = 1.0 if not first.any() else 1 - product / (2 * first.square().sum())
    b = 1.0 if not second.any() else 1 - product / (2 * second.square().sum())
    return a * first + b * second


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)).double()


def loss(model, step, rank, one_pass=0):
    torch.manual_seed(100 * step + 10 * one_pass + rank)
    return model(torch.randn(6, 5).double()).square().mean()


def train(kind, passes, compression):
    """Compare with one process that computes the steps of all ranks."""
    model = network()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters()),
        model.named_parameters(),
        op=hvd.Adasum,
        backward_passes_per_step=passes,
        compression=compression,
    )
    copies = [network() for _ in range(RANKS)]
    owns = [OPTIMIZERS[kind](copy.parameters()) for copy in copies]
    for step in range(4):
        optimizer.zero_grad()
        for one_pass in range(passes):
            loss(model, step, hvd.rank(), one_pass).backward()
        optimizer.step()
        starts = [parameter.detach().clone() for parameter in copies[0].parameters()]
        for rank in range(RANKS):
            owns[rank].zero_grad()
            for one_pass in range(passes):
                loss(copies[rank], step, rank, one_pass).backward()
            owns[rank].step()
        with torch.no_grad():
            for start, *parts in zip(starts, *(copy.parameters() for copy in copies), strict=True):
                together = start + adasum(*(part - start for part in parts))
                for part in parts:
                    part.copy_(together)
    got, want = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, copies[0]))
    return ((got - want).norm() / want.norm()).item(), got


def use_a_parameter_on_one_rank():
    """Use a parameter on only one rank: on the other rank, its step has length zero."""
    used, unused = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused, frozen], lr=1.0), op=hvd.Adasum)
    (used.sum() + (unused.sum() * 3 if hvd.rank() == 1 else 0)).backward()
    optimizer.step()
    return used.tolist(), unused.tolist(), frozen.tolist()


def freeze_with_a_gradient(stepped):
    """Freeze a parameter that keeps the gradient of its rank."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0, momentum=0.5), op=hvd.Adasum)
    (weights[0][hvd.rank()] + weights[1].sum()).backward()
    if stepped:
        optimizer.step()
    weights[0].requires_grad_(False)
    optimizer.step()
    return [weight.tolist() for weight in weights]


def train_with_closure_and_schedule():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Adasum)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        value = weight[hvd.rank()] * 1.0
        value.backward()
        return value

    values = []
    for _ in range(2):
        values.append(optimizer.step(closure).item())
        schedule.step()
    return weight.tolist(), values


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_combined_by_the_definition_of_adasum(group, kind):
    results = group.run(train, kind, 1, hvd.Compression.none)
    assert all(distance < 1e-10 for distance, _ in results)
    assert torch.equal(results[0][1], results[1][1]), "ranks must agree bitwise"


def test_several_passes_make_one_step(group):
    assert all(distance < 1e-10 for distance, _ in group.run(train, "SGD", 3, hvd.Compression.none))


def test_steps_can_be_compressed(group):
    results = group.run(train, "SGD", 1, hvd.Compression.bf16)
    assert all(1e-10 < distance < 0.02 for distance, _ in results)
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(("stepped", "expected"), [(False, -1.0), (True, -2.5)])
def test_ranks_agree_on_a_frozen_parameter_that_still_changes(group, stepped, expected):
    first, other = group.run(freeze_with_a_gradient, stepped)
    assert first == other == [[expected] * 2] * 2


def test_equal_steps_are_averaged_and_a_missing_step_counts_as_zero(group):
    for used, unused, frozen in group.run(use_a_parameter_on_one_rank):
        assert used == pytest.approx([-1.0, -1.0])
        assert unused == pytest.approx([-3.0, -3.0])
        assert frozen == [1.0, 1.0]


def test_orthogonal_steps_are_added_and_schedules_apply(group):
    for weight, values in group.run(train_with_closure_and_schedule):
        assert weight == pytest.approx([-1.5, -1.5])
        assert values == pytest.approx([0.0, -1.0])


def test_the_class_keeps_its_name_and_state(alone):
    weight = torch.nn.Parameter(torch.zeros(2))
    plain = torch.optim.Adam([weight], lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, op=hvd.Adasum)
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    second = torch.nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [second]})
    (weight.sum() + second.sum()).backward()
    optimizer.synchronize()
    optimizer.step()
    assert second.item() == pytest.approx(-0.1)
    assert optimizer.state_dict()["state"].keys() == {0, 1}


def test_unsupported_calls_are_rejected(alone):
    weight = torch.nn.Parameter(torch.zeros(2))
    plain = torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(ValueError, match="op=Adasum sends the step"):
        hvd.DistributedOptimizer(plain, op=hvd.Adasum, groups=2)
    with pytest.raises(ValueError, match=r"gradient_predivide_factor=2\.0 needs op=Average"):
        hvd.DistributedOptimizer(plain, op=hvd.Adasum, gradient_predivide_factor=2.0)
    optimizer = hvd.DistributedOptimizer(plain, op=hvd.Adasum)
    with pytest.raises(ValueError, match="created with op=Adasum"):
        optimizer.weight_next(0.5)
    with pytest.raises(ValueError, match="created with op=Adasum"):
        optimizer.contribute_nothing()
    with pytest.raises(AssertionError, match="cannot be used with op=Adasum"), optimizer.skip_synchronize():
        pass
    with pytest.raises(ValueError, match="already distributed"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
