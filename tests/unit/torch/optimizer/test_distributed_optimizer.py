from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.comm import session
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.errors import ConfigError, MismatchError
from tests.ranks import TORCH, RankGroup


@pytest.fixture(
    scope="module", params=[pytest.param(2, id="2 ranks", marks=pytest.mark.soak), pytest.param(3, id="3 ranks")]
)
def group(request):
    with RankGroup(request.param, imports=TORCH) as started:
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


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("plan", [EVEN, UNEVEN, SOME_EMPTY], ids=["even", "uneven", "some ranks without rows"])
def test_weighted_ranks_equal_one_process_on_the_whole_batch(group, kind, plan):
    plan = [rows if sum(rows[: group.size]) else (1, 1, 1) for rows in plan]
    results = group.run(compare, kind, plan)
    for distance, same_states, parameters in results:
        assert distance < 1e-6
        assert same_states, "a parameter that no row of a step uses must not change"
        assert torch.equal(parameters, results[0][2]), "ranks must agree bitwise"


@pytest.mark.parametrize("plan", [EVEN, UNEVEN, SOME_EMPTY], ids=["even", "uneven", "some ranks without rows"])
def test_shares_of_several_passes_per_step_accumulate_exactly(group, plan):
    for distance, same_states, _ in group.run(compare, "momentum and decay", plan, 4):
        assert distance < 1e-6
        assert same_states


def test_without_weights_gradients_are_averaged_over_equal_shards(group):
    for distance in group.run(average_without_weights):
        assert distance < 1e-6


def test_a_closure_is_evaluated_and_its_gradients_exchanged(group):
    for distance in group.run(train_with_closure):
        assert distance < 1e-6


@pytest.mark.parametrize(
    ("options", "of_two", "of_three"),
    [
        ({}, 1.5, 2.0),
        ({"op": hvd.Sum}, 3.0, 6.0),
        ({"op": hvd.Max}, 2.0, 3.0),
        ({"gradient_predivide_factor": 4.0}, 1.5, 2.0),
        ({"backward_passes_per_step": 3, "steps": 3}, 4.5, 6.0),
        ({"backward_passes_per_step": 3, "steps": 2}, 3.0, 4.0),
    ],
    ids=str,
)
def test_gradients_are_combined_by_the_chosen_operator(group, options, of_two, of_three):
    want = {2: of_two, 3: of_three}[group.size]
    steps = options.pop("steps", 1)
    for got in group.run(combined_gradient, steps, options):
        assert got == pytest.approx([want] * 3)
    options["steps"] = steps


def freeze_with_a_gradient(passes, weighted, clears):
    """Freeze a layer that keeps its gradient, or zeros; return the parameters of a plain process and of this rank."""
    return [
        train_a_frozen_layer(passes, distributed, distributed and weighted, clears) for distributed in (False, True)
    ]


def train_a_frozen_layer(passes, distributed, weighted, clears):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=passes)
    own = slice(4 * hvd.rank(), 4 * hvd.rank() + 4) if distributed else slice(None)
    for step in range(4):
        trained = model.second if step >= 2 else model
        model.first.requires_grad_(step < 2)
        optimizer.zero_grad(set_to_none=False) if clears else trained.zero_grad()
        for part in range(passes):
            features, labels = rows_of_step(10 * step + part, 4 * hvd.size())
            if weighted:
                optimizer.weight_next(1 / (hvd.size() * passes))
            loss = loss_of(model, features[own], labels[own], 1)
            (loss if weighted else loss / passes).backward()
        optimizer.step()
    return parameters_of(model)


def freeze_with_a_gradient_on_one_rank():
    """Keep the gradient 1 of a frozen layer on rank 0; the other ranks have none."""
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0))
    weights[0].requires_grad_(False)
    weights[0].grad = torch.ones(1) if hvd.rank() == 0 else None
    weights[1].sum().backward()
    optimizer.step()
    return [weight.item() for weight in weights]


def combined_gradient(steps, options):
    return gradient_with(steps, **options)


def test_gradients_can_be_clipped_between_synchronize_and_step(group):
    for moved in group.run(clip_between):
        assert moved == pytest.approx([1.0, 1.0])


def test_parameters_may_be_frozen_and_unfrozen_between_steps(group):
    results = group.run(freeze_and_thaw)
    for changed, parameters in results:
        assert changed == [(False, True), (True, False)]
        assert torch.equal(parameters, results[0][1])


@pytest.mark.parametrize(
    ("passes", "weighted", "clears"),
    [(1, False, False), (2, False, False), (1, True, False), (2, True, False), (1, False, True)],
)
def test_a_frozen_parameter_still_changes_while_its_gradient_is_kept(group, passes, weighted, clears):
    """Like in one process, an optimizer applies a gradient, even of zeros, until it is None."""
    for plain, own in group.run(freeze_with_a_gradient, passes, weighted, clears):
        assert torch.allclose(plain, own, rtol=1e-12, atol=0)


def test_a_gradient_kept_on_one_rank_is_averaged_with_zeros(group):
    for weights in group.run(freeze_with_a_gradient_on_one_rank):
        assert weights == pytest.approx([-1 / group.size, -1.0])


def test_gradients_of_any_layout_and_type_are_exchanged(group):
    group.run(exchange_odd_gradients)


def test_a_weighted_step_beside_an_unweighted_step_is_an_error_on_every_rank(group):
    for message in group.run(mix_weighted_and_plain):
        assert "gradient.the weight" in message
        assert "sum" in message
        assert "average" in message


def test_gradients_are_matched_by_name_in_any_order(group):
    others = group.size - 1
    want = [-(i + 1.0) - (8 - i) * others for i in range(8)]
    assert group.run(use_gradients_in_reverse) == [want] * group.size


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_ranks_may_list_named_parameters_in_different_orders(group, shift):
    gradients = {"first": group.size - 1.0, "second": 1.0, "third": None, "unused": None}
    assert group.run(list_parameters_in_another_order, shift, seconds=20.0) == [gradients] * group.size


# One rank suffices for the contract of the class. Plain tensors represent the steps: torch's own step does not run.


def a_parameter():
    return torch.nn.Parameter(torch.ones(2))


def test_the_class_keeps_its_name_its_base_and_its_state(alone):
    weight = a_parameter()
    plain = torch.optim.Adam([weight], lr=0.1)
    wrapped = hvd.DistributedOptimizer(plain)
    assert type(wrapped).__name__ == "Adam"
    assert isinstance(wrapped, torch.optim.Adam)
    assert wrapped.param_groups is plain.param_groups
    assert wrapped.state is plain.state
    assert wrapped.state_dict() == plain.state_dict()


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_a_copy_warns_that_it_exchanges_no_gradients(alone, op):
    weight = a_parameter()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), op=op)
    copied, parameter = copy.deepcopy((optimizer, weight))
    parameter.sum().backward()
    with pytest.raises(ConfigError, match="wrap it"):
        copied.step()
    other = torch.optim.SGD([parameter], lr=1.0)
    other.load_state_dict(copied.state_dict())
    hvd.DistributedOptimizer(other, op=op).step()
    assert parameter.tolist() == pytest.approx([0.9, 0.9])


def test_zero_grad_between_backward_and_step_is_rejected(alone):
    weight = a_parameter()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    weight.sum().backward()
    with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after loss\.backward\(\) but before"):
        optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.zero_grad()
    assert weight.grad is None


def test_more_backward_passes_than_configured_are_rejected(alone):
    weight = a_parameter()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("w", weight)])
    weight.sum().backward()
    with pytest.raises(AssertionError, match=r"'gradient\.w' was computed more than backward_passes_per_step=1 times"):
        weight.sum().backward()
    optimizer.synchronize()
    assert weight.grad.tolist() == [1.0, 1.0]
    optimizer.set_backward_passes_per_step(2)
    optimizer.zero_grad()
    weight.sum().backward()
    weight.sum().backward()
    optimizer.synchronize()
    assert weight.grad.tolist() == [2.0, 2.0]


def test_a_gradient_that_is_replaced_during_the_exchange_is_detected(alone):
    weight = a_parameter()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    weight.sum().backward()
    weight.grad = None
    with pytest.raises(AssertionError, match=r"grad of 'gradient\.0\.0' was replaced or set to None"):
        optimizer.synchronize()


CHANGES = {
    "norm": lambda weight: torch.nn.utils.clip_grad_norm_([weight], 0.1),
    "value": lambda weight: torch.nn.utils.clip_grad_value_([weight], 0.1),
    "foreach": lambda weight: torch._foreach_mul_([weight.grad], 2.0),
}


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16], ids=["plain", "fp16"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_gradient_that_is_changed_during_the_exchange_is_detected(change, compression, alone):
    weight = a_parameter()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), compression=compression)
    weight.sum().backward()
    change(weight)
    with pytest.raises(AssertionError, match=r"grad of 'gradient\.0\.0' was changed in place .*synchronize\(\) before"):
        optimizer.step()
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.synchronize()
    change(weight)
    optimizer.zero_grad()


def take_step(scaler, optimizer):
    scaler.step(optimizer)


def unscale_and_step(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def synchronize_and_step(scaler, optimizer):
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


def steps_with_a_scaler(step, infinite_ranks, settings, optimizer_settings):
    """Return the weight and the scale after two steps, the first with an infinite gradient on some ranks."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0, **optimizer_settings), **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for factor in (float("inf") if hvd.rank() in infinite_ranks else 1.0, float(hvd.rank() + 1)):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        step(scaler, optimizer)
        scaler.update()
    return weight.tolist(), scaler.get_scale()


@pytest.mark.parametrize("infinite_ranks", [(0,), (1,), ()], ids=str)
@pytest.mark.parametrize("step", [take_step, unscale_and_step, synchronize_and_step])
@pytest.mark.parametrize("optimizer_settings", [{}, {"fused": True}], ids=["loop", "fused"])
def test_all_ranks_skip_a_step_that_overflows_on_one(group, infinite_ranks, step, optimizer_settings):
    mean = (1 + group.size) / 2
    expected = ([1 - mean] * 2, 32.0) if infinite_ranks else ([-mean] * 2, 64.0)
    assert group.run(steps_with_a_scaler, step, infinite_ranks, {}, optimizer_settings) == [expected] * group.size


@pytest.mark.parametrize("step", [take_step, unscale_and_step])
def test_all_ranks_skip_a_step_of_adasum_that_overflows_on_one(group, step):
    results = group.run(steps_with_a_scaler, step, (1,), {"op": hvd.Adasum}, {})
    mean = (1 + group.size) / 2  # of parallel steps
    assert results == [([1 - mean] * 2, 32.0)] * group.size


def test_step_in_skip_synchronize_without_synchronize_is_rejected(alone):
    weight = a_parameter()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    weight.sum().backward()
    with optimizer.skip_synchronize(), pytest.raises(AssertionError, match=r"inside skip_synchronize\(\) after"):
        optimizer.step()
    optimizer.synchronize()


def test_closing_and_deleting_remove_the_hooks(alone):
    weight = a_parameter()
    closed = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    closed.close()
    weight.sum().backward()
    weight.sum().backward()
    dropped = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    del dropped
    gc.collect()
    weight.sum().backward()
    weight.sum().backward()
    assert weight.grad.tolist() == [4.0, 4.0]


def test_parameters_are_freed_with_their_optimizer(alone):
    weight = a_parameter()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    weight.sum().backward()
    optimizer.step()
    freed = weakref.ref(weight)
    del weight, optimizer
    gc.collect()
    assert freed() is None


def test_parameters_that_are_added_later_are_exchanged_too(alone):
    first, second = a_parameter(), a_parameter()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first], lr=0.1))
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    (first.sum() + second.sum()).backward()
    with pytest.raises(AssertionError, match="was computed more than backward_passes_per_step=1 times before step"):
        second.sum().backward()
    optimizer.synchronize()


def test_shares_weight_the_gradient_of_one_rank_too(alone):
    weight = a_parameter()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), backward_passes_per_step=2)
    for share, scale in ((0.25, 4.0), (0.75, 8.0)):
        optimizer.weight_next(share)
        (weight.sum() * scale).backward()
    optimizer.synchronize()
    assert weight.grad.tolist() == [7.0, 7.0]


def test_gradients_cannot_be_exchanged_after_shutdown():
    session.set_launch_context(LaunchContext())
    hvd.init()
    weight = a_parameter()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    hvd.shutdown()
    with pytest.raises(ValueError, match="has been shut down"):
        weight.sum().backward()
    optimizer.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda w, o: hvd.DistributedOptimizer(o, [("a", w), ("a", a_parameter())]),
            r"the names \['a'\] more than once",
        ),
        (
            lambda w, o: hvd.DistributedOptimizer(o, [("b", a_parameter())]),
            r"does not name 1 parameter of the optimizer \(group 0, position 0, shape \(2,\)\); its names are \['b'\]",
        ),
        (lambda w, o: hvd.DistributedOptimizer(o, [w]), r"not a \(name, parameter\)"),
        (lambda w, o: hvd.DistributedOptimizer(hvd.DistributedOptimizer(o)), "already distributed"),
        (lambda w, o: hvd.DistributedOptimizer(torch.optim.LBFGS([w])), "LBFGS decides from its rank's own loss"),
        (lambda w, o: hvd.DistributedOptimizer(o, backward_passes_per_step=0), "must be at least 1, got 0"),
        (
            lambda w, o: hvd.DistributedOptimizer(o, op=hvd.Sum, gradient_predivide_factor=2.0),
            "gradient_predivide_factor=2.0 needs op=Average, not sum",
        ),
        (lambda w, o: hvd.DistributedOptimizer(o, gradient_predivide_factor=0.0), "must be positive, got 0.0"),
        (lambda w, o: hvd.DistributedOptimizer(o).weight_next(1.5), "between 0 and 1, got 1.5"),
        (lambda w, o: hvd.DistributedOptimizer(o).weight_next(float("nan")), "got nan"),
        (lambda w, o: hvd.DistributedOptimizer(o, op=hvd.Sum).weight_next(0.5), "created with op=sum"),
    ],
)
def test_invalid_settings_are_rejected(alone, make, message):
    weight = a_parameter()
    with pytest.raises(ValueError, match=message):
        make(weight, torch.optim.SGD([weight], lr=0.1))


def exchange_for_two_optimizers():
    """On rank 0, start to exchange the gradients of a second optimizer before the other ranks join for the first."""
    models = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    if hvd.rank() == 0:
        models[0](torch.ones(1, 2)).sum().backward()
        with pytest.raises(ConfigError, match=r"^Another optimizer is exchanging a gradient named 'gradient\.0\.0'\."):
            models[1](torch.ones(1, 2)).sum().backward()
    hvd.barrier()
    if hvd.rank() != 0:
        models[0](torch.ones(1, 2)).sum().backward()
    optimizers[0].step()


def test_two_optimizers_without_names_in_one_backward_pass_say_what_to_do(group):
    group.run(exchange_for_two_optimizers)
