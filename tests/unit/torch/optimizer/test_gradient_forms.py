"""Compressed, grouped, sparse and missing gradients, and the cost of an exchange."""

from __future__ import annotations

import copy

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.comm import session
from sparkhvd.errors import ConfigError
from tests.ranks import TORCH, RankGroup

RANKS = 3


@pytest.fixture(scope="module")
def group():
    with RankGroup(RANKS, imports=TORCH) as started:
        yield started


class Quantizer:
    """A user-defined compressor, which sends eighths as integers."""

    def compress(self, tensor):
        return (tensor * 8).round().to(torch.int32), tensor.dtype

    def decompress(self, tensor, dtype):
        return tensor.to(dtype) / 8


class Quarters:
    """A compressor in the form of Horovod's: a class that is never instantiated."""

    @staticmethod
    def compress(tensor):
        return (tensor * 4).round().to(torch.int32), tensor.dtype

    @staticmethod
    def decompress(tensor, dtype):
        return tensor.to(dtype) / 4


# Functions that the ranks run.


def exchange_compressed(kind):
    compression = {
        "none": hvd.Compression.none,
        "fp16": hvd.Compression.fp16,
        "bf16": hvd.Compression.bf16,
        "own": Quantizer(),
        "a class": Quarters,
    }[kind]
    wide, small, whole = (
        torch.nn.Parameter(torch.zeros(4, 3, dtype=t)) for t in (torch.float64, torch.float16, torch.float32)
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([wide, small, whole], lr=1.0), op=hvd.Sum, compression=compression
    )
    moved = []
    for _ in range(2):
        optimizer.zero_grad()
        ((wide.sum() + whole.sum()) * (hvd.rank() + 0.25) + small.sum()).backward()
        optimizer.step()
        moved.append(
            [wide.detach().unique().tolist(), small.detach().unique().tolist(), whole.detach().unique().tolist()]
        )
        assert (wide.grad.dtype, small.grad.dtype) == (torch.float64, torch.float16)
    return moved


def bytes_of_a_step(compression):
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=compression)
    counters = []
    for _ in range(3):
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counters.append(session.current().counters()["bytes"])
    return counters[2] - counters[1]


class Words(torch.nn.Module):
    """Sparse embeddings and dense layers; only some ranks use one of the tables, and no rank uses another."""

    def __init__(self, sparse=True):
        super().__init__()
        self.table = torch.nn.Embedding(50, 4, sparse=sparse)
        self.seldom = torch.nn.Embedding(20, 4, sparse=sparse)
        self.never = torch.nn.Embedding(5, 4, sparse=sparse)
        self.bag = torch.nn.EmbeddingBag(30, 4, sparse=sparse, mode="sum")
        self.last = torch.nn.Linear(4, 2)

    def forward(self, ids, seldom):
        hidden = self.table(ids).sum(1) + self.bag(ids % 30)
        return self.last(hidden + self.seldom(ids[:, 0] % 20) if seldom else hidden)


def words():
    torch.manual_seed(3)
    return Words().double()


def batch_of_words(step, rows):
    torch.manual_seed(step)
    return torch.randint(0, 50, (rows, 6)), torch.randn(rows, 2).double()


def train_words(rows_of_rank, seldom_of_rank, **options):
    """Train with shares of the rows, and compare with one process that runs the ranks' shards one after another."""
    plain, shared = words(), words()
    ours = hvd.DistributedOptimizer(torch.optim.SGD(shared.parameters(), lr=0.1), shared.named_parameters(), **options)
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    total = sum(rows_of_rank)
    for step in range(4):
        ids, labels = batch_of_words(step, total)
        alone.zero_grad()
        ours.zero_grad()
        for rank, rows in enumerate(rows_of_rank):
            mine = slice(sum(rows_of_rank[:rank]), sum(rows_of_rank[: rank + 1]))
            if not rows:
                if rank == hvd.rank():
                    ours.contribute_nothing()
                continue
            (
                torch.nn.functional.mse_loss(plain(ids[mine], seldom_of_rank[rank]), labels[mine]) * rows / total
            ).backward()
            if rank == hvd.rank():
                ours.weight_next(rows / total)
                torch.nn.functional.mse_loss(shared(ids[mine], seldom_of_rank[rank]), labels[mine]).backward()
        alone.step()
        ours.step()
    for (name, got), want in zip(shared.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=name)
        if not options.get("sparse_as_dense"):
            assert (got.grad is None) == (want.grad is None), name
            assert got.grad is None or got.grad.layout is want.grad.layout, name
    return torch.cat([parameter.detach().flatten() for parameter in shared.parameters()])


def average_sparse():
    """Train without shares; return the gradient in the form that torch's sparse optimizers need."""
    table = torch.nn.Embedding(10, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters(), lr=0.1))
    table(torch.tensor([hvd.rank(), 9, 9])).sum().backward()
    optimizer.synchronize()
    gradient = table.weight.grad
    assert gradient.is_coalesced()
    with optimizer.skip_synchronize():
        optimizer.step()
    return gradient.to_dense()[:, 0].tolist(), gradient.indices().tolist()


def kinds_of_a_sparse_step(as_dense):
    """Return the number of allreduces and allgathers for a sparse gradient."""
    table = torch.nn.Embedding(10, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), sparse_as_dense=as_dense)
    before = [operations_of(kind) for kind in ("allreduce", "allgather")]
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    return [operations_of(kind) - count for kind, count in zip(("allreduce", "allgather"), before, strict=True)]


def operations_of(kind):
    return session.current().counters().get(f"{kind}.operations", 0)


def sent_before_the_other(grouped):
    """Return the number of gradients sent when one of two is computed, and at the end."""
    first, second = parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    plain = torch.optim.SGD(parameters, lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, groups=[parameters] if grouped else None)
    before = operations_of("allreduce")
    first.sum().backward()
    hvd.barrier()
    between = operations_of("allreduce")
    second.sum().backward()
    optimizer.step()
    return between - before, operations_of("allreduce") - before


def half_of_large(factor):
    """Average gradients whose sum exceeds the range of the dtype for transfer."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), compression=hvd.Compression.fp16, gradient_predivide_factor=factor
    )
    (weight * 48000.0).sum().backward()
    optimizer.step()
    return -weight.item()


def small_factor_with_a_missing_gradient():
    """Train a float16 weight of which only rank 1 has a gradient, with a factor that float16 rounds to 0."""
    everywhere, somewhere = (torch.nn.Parameter(torch.zeros(1, dtype=torch.float16)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([everywhere, somewhere], lr=1.0), gradient_predivide_factor=1e-8
    )
    (everywhere.sum() + (somewhere.sum() * RANKS * 1e-8 if hvd.rank() == 1 else 0.0)).backward()
    optimizer.step()
    return somewhere.item()


def refuse_sparse_maximum():
    table = torch.nn.Embedding(10, 2, sparse=True)
    plain = torch.optim.SGD(table.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, [("table", table.weight)], op=hvd.Max)
    with pytest.raises(ValueError, match=r"'gradient\.table' is sparse and cannot be combined with op=max"):
        table(torch.tensor([1])).sum().backward()
    optimizer.close()


def mix_sparse_and_dense():
    table = torch.nn.Embedding(10, 2, sparse=hvd.rank() == 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), [("table", table.weight)])
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(hvd.MismatchError) as caught:
        optimizer.step()
    return str(caught.value)


def layered():
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(6))).double()


def train_layered(groups_of, unused_on=(), passes=1):
    model = layered()
    groups = groups_of(model) if callable(groups_of) else groups_of
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01),
        model.named_parameters(),
        groups=groups,
        backward_passes_per_step=passes,
    )
    for step in range(3):
        optimizer.zero_grad()
        for one in range(passes):
            torch.manual_seed(100 * step + 10 * one + hvd.rank())
            layers = model[3:] if hvd.rank() in unused_on else model
            layers(torch.randn(4, 5).double()).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def groups_differ():
    plain = train_layered(None)
    for groups in (1, 2, 5, 12, 40, pairs_of):
        assert torch.equal(train_layered(groups), plain), groups
    assert torch.equal(train_layered(3, passes=2), train_layered(None, passes=2))
    assert torch.equal(train_layered(3, unused_on=(1,)), train_layered(None, unused_on=(1,)))
    assert torch.equal(train_layered(4, unused_on=(0, 1, 2)), train_layered(None, unused_on=(0, 1, 2)))
    return plain


def pairs_of(model):
    return [[model[0].weight, model[5].bias], [model[1].weight, model[2].weight, model[3].weight]]


def operations_of_a_step(unused):
    """Return the numbers of requests to the core and of executed operations in a steady step."""
    parameters = [torch.nn.Parameter(torch.zeros(10)) for _ in range(20)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    counts = []
    for _ in range(4):
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in (parameters[:-1] if unused else parameters)).backward()
        optimizer.step()
        counts.append(session.current().counters()["operations"])
    return counts[3] - counts[2]


def scale_learning_rate():
    """Use schedulers created before and after wrapping with the wrapped optimizer."""
    weight = torch.nn.Parameter(torch.zeros(1))
    plain = torch.optim.SGD([weight], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, op=hvd.Sum)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    rates = []
    for _ in range(4):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
        rates.append(scheduler.get_last_lr()[0])
        scheduler.step()
    return rates, weight.item()


def save_and_load():
    def made():
        model = layered()
        return model, hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters())

    def step(model, optimizer, number):
        torch.manual_seed(100 * number + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(4, 5).double()).square().mean().backward()
        optimizer.step()

    first, first_optimizer = made()
    for number in range(2):
        step(first, first_optimizer, number)
    saved = copy.deepcopy((first.state_dict(), first_optimizer.state_dict()))
    second, second_optimizer = made()
    second.load_state_dict(saved[0])
    second_optimizer.load_state_dict(saved[1])
    for number in range(2, 4):
        step(first, first_optimizer, number)
        step(second, second_optimizer, number)
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


# The expected results.


@pytest.mark.parametrize("kind", ["none", "fp16", "bf16", "own", "a class"])
def test_compressed_gradients_keep_their_own_type(group, kind):
    for first, second in group.run(exchange_compressed, kind):
        assert first == [[-3.75], [-3.0], [-3.75]]
        assert second == [[-7.5], [-6.0], [-7.5]]


def test_compression_halves_the_transferred_bytes(group):
    plain = group.run(bytes_of_a_step, hvd.Compression.none)
    half = group.run(bytes_of_a_step, hvd.Compression.fp16)
    assert plain[0] > 4000
    assert half[0] * 2 == plain[0]


@pytest.mark.parametrize("options", [{}, {"sparse_as_dense": True}], ids=["sparse", "as dense"])
@pytest.mark.parametrize(
    ("rows", "seldom"),
    [((4, 4, 4), (True, True, True)), ((1, 5, 2), (False, True, False)), ((0, 3, 0), (False, True, True))],
    ids=["even", "uneven and used by one", "two ranks without rows"],
)
def test_sparse_gradients_equal_those_of_one_process(group, rows, seldom, options):
    results = group.run(train_words_with, rows, seldom, options)
    assert all(torch.equal(result, results[0]) for result in results), "ranks must agree bitwise"


def train_words_with(rows, seldom, options):
    return train_words(rows, seldom, **options)


def test_sparse_gradients_are_sent_sparse_unless_densified(group):
    # One allreduce of each step sends the presence vector.
    assert group.run(kinds_of_a_sparse_step, False) == [[1, 1]] * group.size
    assert group.run(kinds_of_a_sparse_step, True) == [[2, 0]] * group.size


def test_gradients_of_a_group_wait_for_each_other(group):
    assert group.run(sent_before_the_other, False) == [(1, 3)] * group.size
    assert group.run(sent_before_the_other, True) == [(0, 3)] * group.size


def test_the_predivide_factor_divides_gradients_before_the_sum(group):
    assert group.run(half_of_large, 1.0) == [float("inf")] * group.size
    assert group.run(half_of_large, 4.0) == [48000.0] * group.size


def test_ranks_without_a_gradient_know_of_it_with_any_predivide_factor(group):
    assert len(set(group.run(small_factor_with_a_missing_gradient))) == 1


def test_sparse_gradients_are_averaged_and_stay_sparse(group):
    third = 1 / 3
    for dense, indices in group.run(average_sparse):
        assert dense == pytest.approx([third, third, third, 0, 0, 0, 0, 0, 0, 2.0])
        assert indices == [[0, 1, 2, 9]]


def test_a_sparse_gradient_has_no_maximum(group):
    group.run(refuse_sparse_maximum)


def test_a_gradient_that_is_sparse_on_only_some_ranks_is_an_error_on_every_rank(group):
    for message in group.run(mix_sparse_and_dense):
        assert "gradient.table" in message
        assert "allgather" in message
        assert "allreduce" in message


def test_groups_change_only_when_gradients_are_sent(group):
    results = group.run(groups_differ)
    assert all(torch.equal(result, results[0]) for result in results)


def test_the_presence_vector_is_one_operation_and_absent_gradients_are_not_sent(group):
    assert group.run(operations_of_a_step, False) == [20 + 1] * RANKS, "20 gradients and the vector"
    assert group.run(operations_of_a_step, True) == [19 + 1] * RANKS


def test_schedulers_work_on_the_result(group):
    for rates, weight in group.run(scale_learning_rate):
        assert rates == pytest.approx([1.0, 1.0, 0.1, 0.1])
        assert weight == pytest.approx(-2.2 * RANKS)


def test_training_continues_from_a_saved_state(group):
    assert group.run(save_and_load) == [True] * RANKS


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (-1, "groups must be at least 0, got -1"),
        ([[torch.zeros(7)]], r"contains tensors of shapes \[\(7,\)\] that are not parameters of the optimizer"),
        ("twice", r"groups contains \['gradient.0.0'\] more than once"),
    ],
)
def test_invalid_groups_are_rejected(alone, groups, message):
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.1), groups=[[weight], [weight]] if groups == "twice" else groups
        )


def test_a_complex_gradient_is_refused_by_its_name(alone):
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("spectrum", weight)])
    optimizer.zero_grad()
    with pytest.raises(ConfigError, match=r"The gradient 'gradient\.spectrum' has dtype torch\.complex64"):
        weight.abs().sum().backward()


def test_num_groups_is_deprecated_but_works(alone):
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.warns(DeprecationWarning, match="pass groups="):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), num_groups=2)
    weight.sum().backward()
    optimizer.step()
    assert weight.grad.tolist() == [1.0, 1.0]
