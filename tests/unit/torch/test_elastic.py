from __future__ import annotations

import threading

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.errors import ConfigError, NotInitializedError

pytestmark = pytest.mark.usefixtures("alone")


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: object = None) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    if scheduler is not None:
        scheduler.step()


def test_all_parts_return_to_the_last_commit_together():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    sampler = hvd.elastic.ElasticSampler(range(10))
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=0)
    step(model, optimizer, scheduler)
    sampler.record_batch(0, 2)
    state.epoch = 1
    state.commit()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    moments = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    step(model, optimizer, scheduler)
    sampler.record_batch(1, 2)
    state.epoch = 2
    state.restore()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moments)
    assert (state.epoch, state.sampler.processed_num, scheduler.last_epoch) == (1, 2, 1)
    assert state.model is model
    assert state.optimizer is optimizer
    step(model, optimizer)
    assert all(torch.equal(value, expected[name]) for name, value in state.model.state_dict().items()) is False
    state.restore()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items()), "twice, too"


def test_sync_saves_the_live_values():
    model = torch.nn.Linear(2, 1)
    state = hvd.elastic.TorchState(model=model, epoch=3)
    with torch.no_grad():
        model.weight.fill_(7.0)
    state.epoch = 4
    state.sync()
    with torch.no_grad():
        model.weight.fill_(0.0)
    state.restore()
    assert model.weight.tolist() == [[7.0, 7.0]]
    assert state.epoch == 4


def test_a_part_that_replaces_another_is_saved_and_restored_in_its_place():
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    state = hvd.elastic.TorchState(model, sampler=hvd.elastic.ElasticSampler(range(10)))
    state.model, state.sampler = other, hvd.elastic.ElasticSampler(range(20))
    weight, first_weight = other.weight.item(), model.weight.item()
    with torch.no_grad():
        model.weight.fill_(7.0)
        other.weight.fill_(7.0)
    state.sampler.record_batch(0, 2)
    state.restore()
    assert (other.weight.item(), state.sampler.processed_num) == (weight, 0)
    assert model.weight.item() == 7.0 != first_weight, "no longer part of the state"
    with pytest.raises(ConfigError, match=r"'model' cannot be replaced by None.*state.model = Linear\("):
        state.model = None
    assert state.model is other


class ExtraState(torch.nn.Linear):
    """A module with a state that is not a tensor."""

    note = "none"

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


def test_the_extra_state_of_a_module_is_committed():
    model = ExtraState(2, 1)
    state = hvd.elastic.TorchState(model)
    model.note = "kept"
    state.sync()
    model.note = "lost"
    state.restore()
    assert model.note == "kept"


def test_an_optimizer_whose_exchange_has_failed_works_after_a_reset():
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer)
    state.sync()
    model(torch.ones(2, 3)).sum().backward()  # the gradients are being exchanged when the connections break
    hvd.shutdown()
    with pytest.raises(NotInitializedError, match="has been shut down"):
        hvd.rank()
    state.restore()
    hvd.init()
    state.on_reset()
    state.sync()
    step(model, optimizer)
    assert model.weight.grad.tolist() == [[2.0, 2.0, 2.0]]


@pytest.mark.parametrize("kind", ["plain", "average", "adasum"])
def test_a_restore_forgets_the_gradients_and_the_scaling_of_the_interrupted_step(kind):
    model = torch.nn.Linear(3, 1)
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in (model.weight, model.bias)]
    if kind != "plain":
        op = hvd.Adasum if kind == "adasum" else hvd.Average
        names = ("weight", "bias")
        optimizers = [
            hvd.DistributedOptimizer(optimizer, [(name, getattr(model, name))], op=op)
            for optimizer, name in zip(optimizers, names, strict=True)
        ]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = hvd.elastic.TorchState(model, optimizers[0], other=optimizers[1], scaler=scaler)
    state.sync()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def backward():
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()

    backward()
    scaler.step(optimizers[0])
    scaler.unscale_(optimizers[1])
    hvd.shutdown()
    state.restore()
    hvd.init()
    state.on_reset()
    state.sync()
    backward()  # loops may reset the gradients after a step instead of before it
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    steps = [parameter.detach() - value for parameter, value in zip(model.parameters(), before, strict=True)]
    assert [step.flatten().tolist() for step in steps] == [[pytest.approx(-0.2)] * 3, [pytest.approx(-0.2)]]


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=["average", "adasum"])
def test_ranks_that_change_while_gradients_accumulate_begin_the_step_anew(op):
    model = torch.nn.Linear(3, 1)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=2, op=op)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = hvd.elastic.TorchState(model, optimizer, scaler=scaler)

    def backward():
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()

    backward()
    scaler.unscale_(optimizer)
    state.commit()  # new ranks, which have no gradients, join here
    hvd.shutdown()
    hvd.init()
    state.on_reset()
    state.sync()
    backward()
    backward()
    scaler.step(optimizer)
    assert model.weight.tolist() == [[-4.0] * 3]


def test_a_state_without_a_model_takes_values_and_any_number_of_models():
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    state = hvd.elastic.TorchState(first=first, second=second, best=0.5)
    with torch.no_grad():
        second.bias.add_(1.0)
    bias = second.bias.item()
    state.commit()
    with torch.no_grad():
        second.bias.add_(1.0)
    state.best = 0.7
    state.restore()
    assert second.bias.item() == bias
    assert state.best == 0.5


@pytest.mark.parametrize("name", ["sync", "_parts", "_values"])
@pytest.mark.parametrize("value", [1, torch.nn.Linear(1, 1)], ids=["plain", "model"])
def test_a_value_or_model_cannot_replace_what_the_state_uses_itself(name, value):
    with pytest.raises(ConfigError, match=f"A value of a state cannot be named {name!r}: TorchState"):
        hvd.elastic.TorchState(**{name: value})


class Odd(torch.nn.Module):
    """A module with tensors of special layouts, and with its own version."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("expanded", torch.tensor([1.0]).expand(4))
        self.register_buffer("image", torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.register_buffer("growing", torch.zeros(0))
        self.versions: list[object] = []

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        self.versions.append(local_metadata.get("version"))
        self.growing = torch.empty_like(state_dict[prefix + "growing"])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_a_commit_reuses_the_memory_of_the_previous_commit_and_keeps_tensors_of_any_layout():
    model = Odd()
    state = hvd.elastic.TorchState(model)
    first = state._parts["model"].saved
    addresses = {name: value.data_ptr() for name, value in first.items()}
    for number in range(1, 4):
        with torch.no_grad():
            model.weight.fill_(number)
            model.image.fill_(number)
            model.growing = torch.full((number,), float(number))
            model.expanded = torch.tensor([float(number)]).expand(4)
        state.commit()
    saved = state._parts["model"].saved
    assert saved["image"].data_ptr() == addresses["image"]
    assert saved["image"].is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        model.weight.zero_()
        model.image.zero_()
        model.growing = torch.zeros(1)
    state.restore()
    assert model.versions == [3]
    assert model.weight.tolist() == [[3.0] * 2] * 3
    assert bool((model.image == 3.0).all())
    assert model.growing.tolist() == model.expanded[:3].tolist() == [3.0] * 3


class Failing(torch.nn.Module):
    """A module whose state fails when asked to."""

    fails = False

    def get_extra_state(self) -> dict[str, int]:
        if self.fails:
            raise ValueError("no state today")
        return {"known": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"known": 1}


@pytest.mark.parametrize("fault", ["a model", "a value"])
def test_an_error_in_a_commit_leaves_the_previous_commit_whole(fault):
    model, failing = torch.nn.Linear(2, 1, bias=False), Failing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = hvd.elastic.TorchState(model, optimizer, failing=failing, step=0)
    for number in (1, 2, 3):
        with torch.no_grad():
            model.weight.fill_(number)
        optimizer.param_groups[0]["lr"], state.step = number, number
        if number == 3:
            failing.fails = fault == "a model"
            state.step = threading.Lock() if fault == "a value" else number
            with pytest.raises((ValueError, ConfigError)):
                state.commit()
        else:
            state.commit()
    state.restore()
    assert (model.weight.tolist(), optimizer.param_groups[0]["lr"], state.step) == ([[2.0, 2.0]], 2, 2)


@pytest.mark.parametrize("change", ["data", "parameter", "dtype", "order", "nothing"])
def test_a_commit_follows_a_model_whose_tensors_are_replaced(change):
    model = torch.nn.ParameterDict({"first": torch.zeros(2, 3), "second": torch.zeros(6)})
    state = hvd.elastic.TorchState(model)
    state.commit()
    state.commit()
    with torch.no_grad():
        if change == "data":
            model["first"].data = model["first"].data.view(3, 2)
        elif change == "parameter":
            model["first"] = torch.nn.Parameter(torch.zeros(3, 2))
        elif change == "dtype":
            model["first"].data = model["first"].data.view(torch.bfloat16).view(torch.float16).view(torch.float32)
            model["second"] = torch.nn.Parameter(model["second"].data.view(torch.int32), requires_grad=False)
        elif change == "order":
            model["first"] = model.pop("first")
        for value in model.values():
            value.copy_(torch.arange(1, 7).reshape(value.shape))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    state.commit()
    saved = state._parts["model"].saved
    assert list(saved) == list(expected)
    for name, value in expected.items():
        assert saved[name].dtype is value.dtype
        assert torch.equal(saved[name], value), name


def test_a_commit_keeps_up_with_an_optimizer_whose_state_grows():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = hvd.elastic.TorchState(model, optimizer)
    for number in range(3):
        step(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.1 * number
        state.commit()
    expected = {name: value.clone() for name, value in optimizer.state_dict()["state"][0].items()}
    step(model, optimizer)
    state.restore()
    step(model, optimizer)
    state.restore()
    assert optimizer.param_groups[0]["lr"] == 0.2
    for name, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, expected[name])


class CountingState(torch.nn.Linear):
    """A module that keeps the very objects that it is given as its state."""

    counts: dict[str, object]

    def get_extra_state(self) -> dict[str, object]:
        return self.counts

    def set_extra_state(self, state: dict[str, object]) -> None:
        self.counts = state


def test_training_after_a_restore_does_not_change_the_commit():
    model = CountingState(2, 1)
    model.counts = {"steps": 1, "sum": torch.ones(1)}
    state = hvd.elastic.TorchState(model)
    for _ in range(2):
        state.restore()
        assert (model.counts["steps"], model.counts["sum"].item()) == (1, 1.0)
        model.counts["steps"] = 2
        model.counts["sum"].add_(1.0)
    state.commit()
    model.counts["steps"] = 3
    state.restore()
    assert model.counts["steps"] == 2, "a commit after a restore is a copy, too"


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_a_commit_keeps_tensors_apart_that_were_one_tensor_in_the_last_commit(kind):
    model = torch.nn.ModuleList([torch.nn.Linear(2, 1, bias=False) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first, second = model.parameters()
    model[1].weight = first
    optimizer.state[first]["momentum_buffer"] = optimizer.state[second]["momentum_buffer"] = torch.zeros(1, 2)
    state = hvd.elastic.TorchState(**({"model": model} if kind == "model" else {"optimizer": optimizer}))
    model[1].weight = second
    with torch.no_grad():
        first.fill_(1.0)
        second.fill_(2.0)
    for number, parameter in enumerate((first, second)):
        optimizer.state[parameter]["momentum_buffer"] = torch.full((1, 2), float(number))
    state.commit()
    state.restore()
    assert [first[0, 0].item(), second[0, 0].item()] == [1.0, 2.0]
    assert [optimizer.state[one]["momentum_buffer"][0, 0].item() for one in (first, second)] == [0.0, 1.0]


def test_a_restored_optimizer_keeps_state_that_is_more_precise_than_its_parameters():
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0, momentum=0.9))
    optimizer.state[weight]["momentum_buffer"] = torch.tensor([1.0 + 2.0**-20])
    state = hvd.elastic.TorchState(optimizer=optimizer)
    state.restore()
    restored = optimizer.state[weight]["momentum_buffer"]
    assert (restored.dtype, restored.item()) == (torch.float32, 1.0 + 2.0**-20)
    restored.zero_()
    state.restore()
    assert optimizer.state[weight]["momentum_buffer"].item() == 1.0 + 2.0**-20, "the commit is a copy"


@pytest.mark.parametrize("kind", ["plain", "average", "adasum"])
def test_a_restore_removes_the_parameter_groups_that_were_added_after_the_commit(kind):
    first, second = torch.nn.Linear(3, 1), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
    if kind != "plain":
        optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum if kind == "adasum" else hvd.Average)
    state = hvd.elastic.TorchState(optimizer=optimizer)
    for _ in range(2):
        optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.5})
        before = second.weight.item()
        step(torch.nn.Sequential(first, second), optimizer)
        assert second.weight.item() != before
        second(first(torch.ones(2, 3))).sum().backward()  # the gradients are on their way when the job breaks
        hvd.shutdown()
        state.restore()
        hvd.init()
        state.on_reset()
        assert [group["lr"] for group in optimizer.param_groups] == [0.1]
        before = second.weight.item()
        step(torch.nn.Sequential(first, second), optimizer)
        assert second.weight.item() == before
        assert not set(optimizer.state) & set(second.parameters())
        second.zero_grad()


def test_a_commit_with_more_parameter_groups_says_what_to_do():
    model = torch.nn.Linear(3, 1)
    optimizer, fresh = (torch.optim.SGD([model.weight], lr=0.1) for _ in range(2))
    optimizer.add_param_group({"params": [model.bias]})
    content = hvd.elastic.TorchState(optimizer=optimizer).dump_commit()
    message = r"optimizer with 2 parameter groups, but this rank's has 1\. Call add_param_group\(\) for the missing"
    with pytest.raises(ConfigError, match=message):
        hvd.elastic.TorchState(optimizer=fresh).load_commit(content)
