from __future__ import annotations

import copy

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.comm import session
from sparkhvd.errors import ConfigError
from tests.ranks import TORCH, RankGroup

RANKS = 3
LAYERS = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}


@pytest.fixture(scope="module")
def group():
    with RankGroup(RANKS, imports=TORCH) as started:
        yield started


def normalize(rows, extent, dtype, options):
    """Compare three steps on this rank's rows with torch's layer in one process on all rows."""
    torch.manual_seed(0)
    shape = (sum(rows), 4, *extent)
    mine = slice(sum(rows[: hvd.rank()]), sum(rows[: hvd.rank() + 1]))
    options = dict(options)
    has_bias = options.pop("bias", True)  # PyTorch has this option since version 2.12
    plain = LAYERS[len(shape)](4, **options).to(dtype)
    if not has_bias:
        plain.register_parameter("bias", None)
    for parameter in plain.parameters():
        torch.nn.init.uniform_(parameter)
    ours = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    assert isinstance(ours, hvd.SyncBatchNorm)
    close = {torch.float64: {"rtol": 1e-10, "atol": 1e-10}, torch.float32: {"rtol": 1e-4, "atol": 1e-4}}[dtype]
    for step in range(3):
        torch.manual_seed(step)
        whole = (torch.randn(shape) * 3 + 50).to(dtype).requires_grad_()
        weights = torch.randn(shape).to(dtype)
        part = whole.detach()[mine].clone().requires_grad_()
        want, got = plain(whole), ours(part)
        torch.testing.assert_close(got, want[mine], **close)
        (want * weights).sum().backward()
        (got * weights[mine]).sum().backward()
        torch.testing.assert_close(part.grad, whole.grad[mine], **close)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, **close)
    for name, parameter in plain.named_parameters():
        summed = hvd.allreduce(ours.get_parameter(name).grad, op=hvd.Sum)
        torch.testing.assert_close(summed, parameter.grad, **close)
    ours.eval(), plain.eval()
    torch.testing.assert_close(
        ours(part.detach()) if len(part) else None, plain(part.detach()) if len(part) else None, **close
    )


def train_convolutions(rows_by_rank):
    """Train convolutions with synchronized batch normalization as one big batch, with weighted losses."""

    def network():
        torch.manual_seed(1)
        layers = [torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Flatten()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(12, 6), torch.nn.BatchNorm1d(6)).double()

    plain, ours = network(), hvd.SyncBatchNorm.convert_sync_batchnorm(network())
    alone = torch.optim.Adam(plain.parameters(), lr=0.01)
    shared = hvd.DistributedOptimizer(torch.optim.Adam(ours.parameters(), lr=0.01), ours.named_parameters())
    before, count = None, sum(rows_by_rank)
    mine = slice(sum(rows_by_rank[: hvd.rank()]), sum(rows_by_rank[: hvd.rank() + 1]))
    for step in range(6):
        torch.manual_seed(10 + step)
        rows, labels = torch.randn(count, 1, 4, 4).double(), torch.randn(count, 6).double()
        for model, optimizer, part, size in ((plain, alone, slice(None), 1), (ours, shared, mine, RANKS)):
            optimizer.zero_grad()
            loss_per_row = (model(rows[part]) - labels[part]).square().mean(dim=1)
            (loss_per_row.sum() * size / count).backward()
            optimizer.step()
        if step == 3:
            before = session.current().counters()
    after = session.current().counters()
    for got, want in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)
    return (after["cache_hits"] - before["cache_hits"]) / (after["operations"] - before["operations"])


def normalize_halves():
    layer = hvd.SyncBatchNorm(2)
    x = torch.tensor([[1.0, 300.0], [3.0, 302.0]]).to(torch.bfloat16) + hvd.rank()
    output = layer(x)
    assert output.dtype is torch.bfloat16
    return output.float().sum().item()


def differentiate_twice():
    layer = hvd.SyncBatchNorm(2)
    x = torch.randn(4, 2, requires_grad=True)
    (first,) = torch.autograd.grad((layer(x) ** 3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


def use_layers_on_old_and_new_ranks():
    """Use a layer before the ranks connect again, on all ranks but the last, and another layer only after that."""
    early, late, x = hvd.SyncBatchNorm(2), hvd.SyncBatchNorm(2), torch.randn(4, 2)
    copied = copy.deepcopy(early)
    early(x)
    hvd.shutdown()
    hvd.init()
    first = copied if hvd.rank() == hvd.size() - 1 else early  # a new process has not used it yet
    return late(first(x)).shape


def run_with_too_few_rows():
    layer = hvd.SyncBatchNorm(2)
    with pytest.raises(ValueError, match="than 1 value per channel in training mode, but all ranks together have 1"):
        layer(torch.ones(1 if hvd.rank() == 1 else 0, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("rows", "extent", "options"),
    [
        ((4, 4, 4), (), {}),
        ((1, 6, 2), (3,), {"momentum": 0.3}),
        ((5, 0, 2), (2, 3), {"affine": False}),
        ((2, 2, 2), (2, 2, 2), {"momentum": None, "eps": 0.1}),
        ((3, 1, 1), (2,), {"track_running_stats": False, "bias": False}),
    ],
    ids=["rows", "uneven rows of sequences", "images, one rank without", "volumes", "without statistics or bias"],
)
def test_statistics_and_gradients_are_those_of_one_process_with_all_rows(group, rows, extent, options, dtype):
    group.run(normalize, rows, extent, dtype, options)


@pytest.mark.parametrize("rows_by_rank", [(4, 4, 4), (7, 0, 5)])
def test_ranks_with_batch_normalization_train_like_one_process(group, rows_by_rank):
    shares = group.run(train_convolutions, rows_by_rank)
    assert all(share > 0.9 for share in shares), f"layers must hit the cache, hits per operation: {shares}"


def test_small_floats_keep_their_type(group):
    assert abs(sum(group.run(normalize_halves))) < 0.05


def test_second_derivatives_are_refused_because_they_would_be_wrong(group):
    group.run(differentiate_twice)


def test_layers_that_only_some_ranks_have_used_before_belong_together(group):
    assert group.run(use_layers_on_old_and_new_ranks) == [(4, 2)] * RANKS


def test_a_single_value_without_variance_is_an_error_on_every_rank(group):
    group.run(run_with_too_few_rows)


def test_a_layer_on_one_rank_works_like_torchs(alone):
    layer, plain = hvd.SyncBatchNorm(3), torch.nn.BatchNorm1d(3)
    x = torch.randn(5, 3)
    torch.testing.assert_close(layer(x), plain(x))
    with pytest.raises(ValueError, match=r"an input of shape \(rows, 3 channels, ...\), got \(5, 4\)"):
        layer(torch.ones(5, 4))
    nested = torch.nn.Sequential(torch.nn.Sequential(torch.nn.BatchNorm2d(2)), torch.nn.ReLU())
    weight = nested[0][0].weight
    hvd.SyncBatchNorm.convert_sync_batchnorm(nested)
    assert isinstance(nested[0][0], hvd.SyncBatchNorm)
    assert nested[0][0].weight is weight


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_an_input_without_floating_point_numbers_is_refused(alone, dtype):
    with pytest.raises(ValueError, match=f"^SyncBatchNorm needs an input of floating-point numbers, got {dtype}; conv"):
        hvd.SyncBatchNorm(3)(torch.ones(4, 3, dtype=dtype))


def test_a_converted_layer_keeps_its_hooks():
    layer, x = torch.nn.BatchNorm1d(3).eval(), torch.randn(5, 3)
    layer.register_forward_hook(lambda _layer, _inputs, output: output * 2)
    layer.register_forward_pre_hook(lambda _layer, inputs: (inputs[0] + 1,))
    want = layer(x)
    assert torch.equal(hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(layer))(x), want)


def test_a_layer_with_several_names_is_converted_to_one_layer():
    layer = torch.nn.BatchNorm1d(3)
    inner = torch.nn.Sequential(torch.nn.Linear(3, 3), layer)
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(layer, inner, layer, inner))
    assert isinstance(model[0], hvd.SyncBatchNorm)
    assert model[0] is model[1][1] is model[2]
    assert model[1] is model[3] is inner


def test_a_layer_with_its_own_forward_is_not_converted():
    class Activated(torch.nn.BatchNorm1d):
        def forward(self, rows):
            return super().forward(rows).relu()

    with pytest.raises(ConfigError, match="Activated is a batch normalization layer that overrides forward"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(Activated(3)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_layer_on_a_gpu_works_like_torchs(alone):
    layer, plain = hvd.SyncBatchNorm(3).cuda(), torch.nn.BatchNorm2d(3).cuda()
    x = torch.randn(5, 3, 2, 2, device="cuda")
    torch.testing.assert_close(layer(x), plain(x))
