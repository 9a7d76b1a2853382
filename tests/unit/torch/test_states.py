from __future__ import annotations

import pytest
import torch

import sparkhvd.torch as hvd
from tests.ranks import TORCH, RankGroup


@pytest.fixture(scope="module")
def group():
    with RankGroup(2, imports=TORCH) as started:
        yield started


OPTIMIZERS = {
    "SGD": torch.optim.SGD,
    "SGD with momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9, nesterov=True),
    "Adam": lambda parameters, lr: torch.optim.Adam(parameters, lr, amsgrad=True),
    "RMSprop": lambda parameters, lr: torch.optim.RMSprop(parameters, lr, centered=True, momentum=0.1),
    "Adagrad": torch.optim.Adagrad,
    "LBFGS": lambda parameters, lr: torch.optim.LBFGS(parameters, lr, history_size=5, max_iter=4),
}


def network(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(8, 1)
    )


def train(model, optimizer, steps):
    torch.manual_seed(100)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 1, 4, 4) * torch.arange(1.0, 5).reshape(4, 1, 1, 1)).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def share_parameters(root):
    model = network(seed=hvd.rank())
    model[0].to(memory_format=torch.channels_last)
    with torch.no_grad():
        model(torch.randn(3, 1, 4, 4) + hvd.rank())  # running statistics and an int64 counter differ
    identities = [id(value) for value in model.parameters()]
    hvd.broadcast_parameters(model.state_dict(), root)
    assert [id(value) for value in model.parameters()] == identities
    other = network(seed=10 + hvd.rank())
    hvd.broadcast_parameters(other.named_parameters(), root)
    return [value.tolist() for value in (*model.state_dict().values(), *other.parameters())]


def share_plain_tensors(root):
    parameters = list(network(hvd.rank()).parameters())
    hvd.broadcast_parameters(parameters, root)
    return [parameter.tolist() for parameter in parameters]


def share_unusual_tensors():
    rank = float(hvd.rank())
    mine = {
        "complex": torch.full((3,), complex(rank, 5.0)),
        "complex scalar": torch.tensor(rank, dtype=torch.complex128),
        "expanded": torch.tensor([[rank], [5.0]]).expand(2, 3),
        "sparse": torch.tensor([0.0, rank, 5.0]).to_sparse(),
    }
    hvd.broadcast_parameters(mine, 1)
    return [tensor.to_dense().tolist() for tensor in mine.values()]


def share_optimizer_state(kind, root_steps, other_steps, root):
    model = network(seed=0)
    lr = 0.01 if hvd.rank() == root else 0.5
    optimizer = OPTIMIZERS[kind](model.parameters(), lr)
    train(model, optimizer, root_steps if hvd.rank() == root else other_steps)
    hvd.broadcast_parameters(model.state_dict(), root)
    hvd.broadcast_optimizer_state(optimizer, root)
    assert optimizer.param_groups[0]["lr"] == 0.01
    train(model, optimizer, 3)
    return [value.tolist() for value in model.parameters()]


def train_undisturbed(kind, steps):
    model = network(seed=0)
    train(model, OPTIMIZERS[kind](model.parameters(), 0.01), steps)
    return [value.tolist() for value in model.parameters()]


def synchronize_different_models():
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(2 - hvd.rank())))
    with pytest.raises(hvd.MismatchError) as caught:
        hvd.elastic.TorchState(model).sync()
    return str(caught.value)


def share_objects():
    return hvd.broadcast_object({"epoch": hvd.rank()}, 1), hvd.allgather_object("ab" * hvd.rank())


@pytest.mark.parametrize("root", [0, 1])
def test_parameters_and_buffers_become_those_of_the_root_in_place(group, root):
    first, second = group.run(share_parameters, root)
    assert first == second
    torch.manual_seed(root)
    assert first[0] == network(root).state_dict()["0.weight"].tolist()


def test_parameters_without_names_are_matched_by_order(group):
    want = [parameter.tolist() for parameter in network(1).parameters()]
    assert group.run(share_plain_tensors, 1) == [want] * 2


def test_tensors_that_cannot_be_reduced_can_be_broadcast(group):
    wanted = [[complex(1.0, 5.0)] * 3, 1.0, [[1.0] * 3, [5.0] * 3], [0.0, 1.0, 5.0]]
    assert group.run(share_unusual_tensors) == [wanted] * 2


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("root_steps", "other_steps", "root"), [(0, 0, 0), (2, 0, 1), (0, 2, 0), (2, 3, 0)], ids=str)
def test_ranks_train_equally_after_the_optimizer_state_is_broadcast(group, kind, root_steps, other_steps, root):
    first, second = group.run(share_optimizer_state, kind, root_steps, other_steps, root)
    assert first == second


def test_broadcasting_does_not_change_the_training_of_the_root(group):
    assert group.run(share_optimizer_state, "Adam", 2, 0, 0) == group.run(train_undisturbed, "Adam", 5)


def test_ranks_with_different_models_do_not_wait_for_each_other(group):
    of_rank_0 = "the tensor '1.weight' of 'model' (float32[1, 1]), the tensor '1.bias' of 'model' (float32[1]). "
    assert all(f"only rank 0 has {of_rank_0}" in message for message in group.run(synchronize_different_models))


def test_objects_are_broadcast_and_gathered(group):
    assert group.run(share_objects) == [({"epoch": 1}, ["", "ab"])] * 2


def test_the_error_for_an_entry_that_is_not_a_tensor_names_it(alone):
    with pytest.raises(ValueError, match=r"got 'extra' of type dict\. Pass a state_dict\(\) of tensors"):
        hvd.broadcast_parameters({"weight": torch.ones(2), "extra": {}})
    with pytest.raises(ValueError, match="an entry of type list"):
        hvd.broadcast_parameters([[torch.ones(2)]])
