from __future__ import annotations

import pytest
import torch
from torch.nn.utils import parametrizations, prune

import sparkhvd.torch as hvd
from sparkhvd.torch.buffers import buffers_unchanged, non_persistent_buffers, synchronize_buffers
from tests.ranks import TORCH, RankGroup


@pytest.fixture(scope="module")
def group():
    with RankGroup(2, imports=TORCH) as started:
        yield started


class Keeping(torch.nn.Module):
    """A module with buffers of many kinds, which differ between ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.spectral = parametrizations.spectral_norm(torch.nn.Linear(3, 3))
        self.pruned = prune.random_unstructured(torch.nn.Linear(3, 3), "weight", 4)
        self.register_buffer("brief", torch.full((2,), 1.0 + 2 * rank, dtype=torch.bfloat16))
        self.register_buffer("flag", torch.tensor(rank == 0))
        self.register_buffer("wave", torch.tensor(1j * rank))
        self.register_buffer("beside", torch.tensor(4.0 * rank), persistent=False)
        self.register_buffer("spread", torch.tensor(2.0 * rank).expand(3))
        self.register_buffer("late", torch.ones(2) if rank == 0 else None)
        self.register_buffer("grown", torch.zeros(3 - rank))
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.register_buffer("mask", torch.tensor([float("-inf"), 0.0]))
        if rank == 0:
            self.register_buffer("of_rank_0", torch.ones(1))


def synchronized_model():
    rank = hvd.rank()
    torch.manual_seed(rank)
    model = Keeping(rank)
    torch.manual_seed(7)
    rows = torch.randn(12, 2) + torch.tensor([[4.0, 0.0]])
    model.norm(rows[:3] if rank == 0 else rows[3:])
    synchronize_buffers(model, 3.0 if rank == 0 else 9.0)
    return {name: buffer.to_dense() for name, buffer in model.named_buffers()}, list(non_persistent_buffers(model))


def test_all_ranks_hold_the_same_buffers(group):
    (buffers, beside), (other, _) = group.run(synchronized_model)
    assert buffers.keys() == other.keys()
    for name, buffer in buffers.items():
        assert torch.equal(buffer, other[name]), name
        assert buffer.dtype == other[name].dtype
    assert beside == ["beside"]
    assert buffers["brief"].tolist() == [2.5, 2.5]
    assert buffers["brief"].dtype is torch.bfloat16
    assert buffers["flag"].item() is True
    assert buffers["wave"].item() == 0.75j
    assert buffers["beside"].item() == 3.0
    assert buffers["spread"].tolist() == [1.5] * 3
    assert buffers["late"].tolist() == [1.0, 1.0]
    assert len(buffers["grown"]) == 3
    assert buffers["of_rank_0"].tolist() == [1.0]
    assert buffers["norm.num_batches_tracked"].item() == 1
    assert sorted(buffers["pruned.weight_mask"].flatten().tolist()) == [0.0] * 4 + [1.0] * 5
    for name in ("_u", "_v"):
        assert buffers[f"spectral.parametrizations.weight.0.{name}"].norm().item() == pytest.approx(1.0)


def test_running_statistics_become_those_of_all_ranks_rows(group):
    torch.manual_seed(7)
    rows = torch.randn(12, 2) + torch.tensor([[4.0, 0.0]])
    means = torch.stack([rows[:3].mean(0), rows[3:].mean(0)]) * 0.1
    variances = 0.9 + torch.stack([rows[:3].var(0), rows[3:].var(0)]) * 0.1
    share = torch.tensor([[0.25], [0.75]])
    mean = (means * share).sum(0)
    found, _ = group.run(synchronized_model)[1]
    assert torch.allclose(found["norm.running_mean"], mean)
    apart = ((means - mean) ** 2 * share).sum(0)
    assert torch.allclose(found["norm.running_var"], (variances * share).sum(0) + apart)


def observed_extremes():
    """Return the buffers of observers; rank 0 has seen small values, and rank 1 large ones."""
    from torch.ao.quantization import fake_quantize, observer  # noqa: PLC0415

    rank = hvd.rank()
    rows = torch.tensor([[-1.0, 2.0], [0.5, -8.0]]) if rank == 0 else torch.tensor([[4.0, 3.0], [-2.0, 0.0]])
    model = torch.nn.ModuleDict(
        {
            "least": observer.MinMaxObserver(),
            "moving": fake_quantize.FakeQuantize(quant_min=0, quant_max=255),
            "channels": observer.PerChannelMinMaxObserver(ch_axis=1),
            "histogram": observer.HistogramObserver(bins=8),
            "unused": observer.MinMaxObserver(),
        }
    )
    for part in (part for name, part in model.items() if name != "unused"):
        part(rows)
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    synchronize_buffers(model, 2.0)
    return own, {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_observers_of_a_quantization_have_the_extremes_of_all_ranks(group):
    (own, buffers), (_, others) = group.run(observed_extremes)
    for name, buffer in buffers.items():
        assert torch.equal(buffer, others[name]), name
    assert (buffers["least.min_val"], buffers["least.max_val"]) == (-8.0, 4.0)
    assert (buffers["unused.min_val"], buffers["unused.max_val"]) == (float("inf"), float("-inf"))
    assert buffers["channels.min_val"].tolist() == [-2.0, -8.0]
    assert buffers["channels.max_val"].tolist() == [4.0, 3.0]
    assert buffers["moving.activation_post_process.min_val"] == -8.0
    assert buffers["moving.scale"].item() == pytest.approx(12 / 255)
    assert buffers["moving.zero_point"].tolist() == [170]
    for name in ("histogram", "min_val", "max_val"):
        assert torch.equal(buffers[f"histogram.{name}"], own[f"histogram.{name}"]), name


class Changing(torch.nn.Module):
    """Changes buffers in place, in a layer and by assignment, and multiplies its input by one."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.kept = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
        self.register_buffer("scale", torch.tensor([2.0, float("nan")]))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("assigned", torch.zeros(2))
        self.register_buffer("spread", torch.tensor(1.0).expand(2))
        self.register_buffer("sparse", torch.eye(2).to_sparse())

    def forward(self, x):
        self.count += 1
        self.assigned = self.assigned + x.mean(0)
        return self.kept(self.norm(self.first(x)) * self.scale[:1] * self.spread)


def test_buffers_are_restored_except_those_of_some_layers_without_affecting_gradients():
    model = Changing()
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    with buffers_unchanged(model, [model.kept]):
        output = model(torch.randn(4, 2))
    output.square().sum().backward()
    assert model.first.weight.grad is not None
    for name, (buffer, value) in before.items():
        found = model.get_buffer(name)
        assert found is buffer
        same = torch.equal(found.to_dense().nan_to_num(), value.to_dense().nan_to_num())
        assert same is not name.startswith("kept."), name
