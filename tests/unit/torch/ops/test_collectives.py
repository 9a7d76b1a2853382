"""Groups, alltoall, reducescatter, join, sparse sums and process sets on tensors, with their gradients."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
from torch.autograd import forward_ad

import sparkhvd.torch as hvd
from tests.ranks import TORCH, RankGroup
from tests.unit.torch.optimizer.test_gradient_forms import Quantizer

RANKS = 3


@pytest.fixture(scope="module")
def group():
    with RankGroup(RANKS, imports=TORCH) as started:
        yield started


# Functions that the ranks run. `everywhere(make)` returns the values of all ranks.


def everywhere(make):
    return [make(rank) for rank in range(hvd.size())]


def mixed(rank):
    """Return tensors of several shapes and types, with small integers, so that sums are exact."""
    torch.manual_seed(rank)
    shapes = [(5,), (2, 3), (), (0, 4), (7, 1)]
    dtypes = [torch.float32, torch.float64, torch.float16, torch.int32, torch.bfloat16]
    return [torch.randint(-8, 8, shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def reduce_in_groups():
    sums = [sum(each) for each in zip(*everywhere(mixed), strict=True)]
    mine = mixed(hvd.rank())
    for got in (
        hvd.grouped_allreduce(mine, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(mine, name="group", op=hvd.Sum)),
        hvd.grouped_allreduce([each.clone() for each in mine], op=hvd.Sum, compression=hvd.Compression.bf16),
    ):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, sums, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(mine, mixed(hvd.rank()), strict=True)), "the inputs must not change"
    own = [each.clone() for each in mine]
    assert all(a is b for a, b in zip(hvd.grouped_allreduce_(own, op=hvd.Sum), own, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(own, sums, strict=True))
    again = [each.clone() for each in mine]
    hvd.synchronize(hvd.grouped_allreduce_async_(again, op=hvd.Sum))
    assert all(torch.equal(a, b) for a, b in zip(again, sums, strict=True))


def reduce_with_compression():
    mine = torch.full((4,), hvd.rank() + 0.125)
    total = [3.375] * 4
    assert hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.fp16).tolist() == total
    assert hvd.allreduce(mine, op=hvd.Sum, compression=Quantizer()).tolist() == total
    assert hvd.allreduce_(mine.clone(), op=hvd.Sum, compression=hvd.Compression.bf16).tolist() == [3.375] * 4
    assert mine.tolist() == [hvd.rank() + 0.125] * 4
    rows = hvd.reducescatter(mine[:3], op=hvd.Sum, compression=hvd.Compression.fp16)
    assert rows.tolist() == total[:1]


def gather_in_groups():
    def make(rank):
        return [torch.full((rank, 2), rank), torch.full((3 - rank,), 10.0 * rank), torch.zeros(0, 1)]

    want = [torch.cat(each) for each in zip(*everywhere(make), strict=True)]
    for got in (hvd.grouped_allgather(make(hvd.rank())), hvd.grouped_allgather_async(make(hvd.rank()), "g").wait()):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def scatter_sums():
    for rows in (0, 1, 2, 3, 7):
        for op in (hvd.Sum, hvd.Average, hvd.Max):
            whole = torch.stack([torch.arange(rows * 2.0).reshape(rows, 2) * (rank + 1) for rank in range(RANKS)])
            combined = {hvd.Sum: whole.sum(0), hvd.Average: whole.mean(0), hvd.Max: whole.max(0).values}[op]
            start = sum(rows // RANKS + (rank < rows % RANKS) for rank in range(hvd.rank()))
            want = combined[start : start + rows // RANKS + (hvd.rank() < rows % RANKS)]
            got = hvd.reducescatter(whole[hvd.rank()], op=op)
            torch.testing.assert_close(got, want)
            handle = hvd.grouped_reducescatter_async([whole[hvd.rank()], whole[hvd.rank()] * 2], op=op)
            pair = hvd.synchronize(handle)
            torch.testing.assert_close(pair[1], want * 2)


def exchange_parts():
    """Send (r + d) % 3 rows of value 10 r + d from rank r to rank d."""

    def rows_for(source, target):
        return torch.full(((source + target) % 3, 2), 10.0 * source + target)

    splits = [(hvd.rank() + target) % 3 for target in range(RANKS)]
    mine = torch.cat([rows_for(hvd.rank(), target) for target in range(RANKS)])
    want = torch.cat([rows_for(source, hvd.rank()) for source in range(RANKS)])
    for given in (splits, torch.tensor(splits)):
        got, received = hvd.alltoall(mine, given)
        assert torch.equal(got, want)
        assert received.tolist() == [(source + hvd.rank()) % 3 for source in range(RANKS)]
    even = hvd.alltoall(torch.arange(6) + 10 * hvd.rank(), name="even")
    assert even.tolist() == [10 * source + 2 * hvd.rank() + i for source in range(RANKS) for i in range(2)]
    assert torch.equal(hvd.synchronize(hvd.alltoall_async(mine, splits))[0], want)


def differentiate_everything():
    """Compare with one process that computes the sum of all ranks' losses from all ranks' inputs."""
    weights = [torch.linspace(0.5, 2.0, 24).reshape(12, 2).double() * (rank + 1) for rank in range(RANKS)]

    def loss(output, rank):
        return (output * weights[rank][: len(output)]).sum() + (output**2).sum()

    def compare(ours, theirs, scale=1.0, rows=6):
        inputs = [torch.arange(2.0 * rows).reshape(rows, 2).double() * (rank + 1) / 7 for rank in range(RANKS)]
        for each in inputs:
            each.requires_grad_()
        sum(loss(theirs(inputs, rank), rank) for rank in range(RANKS)).backward()
        mine = inputs[hvd.rank()].detach().clone().requires_grad_()
        loss(ours(mine), hvd.rank()).backward()
        want = inputs[hvd.rank()].grad
        torch.testing.assert_close(mine.grad, torch.zeros_like(mine) if want is None else want * scale)

    def part(rank):
        return slice(2 * rank, 2 * rank + 2)

    compare(lambda x: hvd.allreduce(x, op=hvd.Sum), lambda all_of, _: sum(all_of))
    compare(lambda x: hvd.allreduce(x, compression=hvd.Compression.none), lambda all_of, _: sum(all_of) / RANKS)
    compare(
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
        lambda all_of, _: sum(all_of) * 1.5,
    )
    compare(lambda x: hvd.grouped_allreduce([x, x * 2], op=hvd.Sum)[1], lambda all_of, _: sum(all_of) * 2)
    mean = 1 / RANKS  # Horovod's convention for collectives that only move rows
    compare(
        lambda x: hvd.allgather(x[: 2 + 2 * hvd.rank()])[:6],
        lambda all_of, _: torch.cat([all_of[0][:2], all_of[1][:4]]),
        mean,
    )
    compare(
        lambda x: hvd.grouped_allgather([x[:2], x[2:4]])[1], lambda all_of, _: torch.cat([x[2:4] for x in all_of]), mean
    )
    compare(lambda x: hvd.broadcast(x, 1), lambda all_of, _: all_of[1], mean)
    compare(hvd.alltoall, lambda all_of, rank: torch.cat([x[part(rank)] for x in all_of]))
    compare(
        lambda x: hvd.alltoall(x, [3, 2, 1])[0],
        lambda all_of, rank: torch.cat([x[[slice(0, 3), slice(3, 5), slice(5, 6)][rank]] for x in all_of]),
    )
    compare(hvd.reducescatter, lambda all_of, rank: sum(all_of)[part(rank)] / RANKS, RANKS)
    compare(lambda x: hvd.reducescatter(x, op=hvd.Sum), lambda all_of, rank: sum(all_of)[part(rank)], RANKS)
    compare(
        lambda x: hvd.grouped_reducescatter([x * 3, x], op=hvd.Sum)[1],
        lambda all_of, rank: sum(all_of)[part(rank)],
        RANKS,
    )
    compare(lambda x: hvd.allgather(hvd.reducescatter(x, op=hvd.Sum)), lambda all_of, _: sum(all_of))


def differentiate_twice():
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad((hvd.allreduce(x, op=hvd.Sum) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return first.tolist(), second.tolist()


def differentiate_a_broadcast_twice():
    x = torch.tensor([1.0 + hvd.rank()], requires_grad=True)
    (first,) = torch.autograd.grad((hvd.broadcast(x, 1) ** 3).sum() * RANKS, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return first.tolist(), second.tolist()


def differentiate_forward():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(NotImplementedError, match="must implement the jvp"):
            hvd.allreduce(dual)


def add_sparse():
    indices = torch.tensor([[0, hvd.rank(), 2], [1, 1, 1]])
    mine = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 4.0]), (4, 3))
    want = sum(
        everywhere(
            lambda rank: torch.sparse_coo_tensor(
                torch.tensor([[0, rank, 2], [1, 1, 1]]), torch.tensor([1.0, 2.0, 4.0]), (4, 3)
            ).to_dense()
        )
    )
    assert torch.equal(hvd.sparse_allreduce(mine, "entries", hvd.Sum).to_dense(), want)
    assert torch.allclose(hvd.synchronize(hvd.sparse_allreduce_async(mine)).to_dense(), want / RANKS)
    assert torch.allclose(hvd.sparse_allreduce_async(mine)().to_dense(), want / RANKS)
    nothing = torch.zeros(4, 3, layout=torch.sparse_coo)
    some = mine if hvd.rank() == 1 else nothing
    assert hvd.sparse_allreduce(some, op=hvd.Sum).to_dense().sum().item() == 7.0
    assert hvd.sparse_allreduce(nothing).to_dense().abs().sum().item() == 0.0
    wider = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 4.0]), (5, 3))
    for odd, op, kind in (
        (mine.int(), hvd.Sum, "sum of torch.int32 [4, 3]"),
        (wider, hvd.Sum, "sum of torch.float32 [5, 3]"),
        (mine, hvd.Average, "average of torch.float32 [4, 3]"),
    ):
        with pytest.raises(hvd.MismatchError) as raised:
            hvd.sparse_allreduce(*((odd, kind, op) if hvd.rank() == 2 else (mine, kind, hvd.Sum)))
        where = "this rank requests" if hvd.rank() == 2 else "rank 2 requests"
        assert f"{where} the {kind}" in str(raised.value)
        assert " the sum of torch.float32 [4, 3]" in str(raised.value)


def add_sparse_integers():
    values = torch.tensor([2**53 + 1, -7, 7])
    mine = torch.sparse_coo_tensor([[0, 1, 1 + (hvd.rank() > 0)]], values, (3,))
    for op in (hvd.Sum, hvd.Average):
        got = hvd.sparse_allreduce(mine, op=op).to_dense()
        want = torch.stack(everywhere(lambda r: torch.tensor([2**53 + 1, -7 + 7 * (r == 0), 7 * (r > 0)]))).sum(0)
        if op is hvd.Average:
            want = torch.div(want, RANKS, rounding_mode="trunc")
        assert got.dtype == torch.int64
        assert torch.equal(got, want), (op, got, want)


def add_sparse_complex_numbers():
    mine = torch.sparse_coo_tensor([[hvd.rank(), 3]], torch.tensor([3j, 1.5 + 3j]), (4,))
    assert torch.allclose(hvd.sparse_allreduce(mine).to_dense(), torch.tensor([1j, 1j, 1j, 1.5 + 3j]))


def differentiate_with_own_scales():
    """Use a different weight on every rank, like a mean over ranks with different numbers of rows."""
    scales = {"prescale_factor": hvd.rank() + 1.0, "postscale_factor": 0.5}
    for op in (hvd.Sum, hvd.Average):
        ranks = RANKS if op is hvd.Sum else 1
        for reduce in (hvd.allreduce, lambda x, **more: hvd.grouped_allreduce([x, x], **more)[1]):
            x = torch.ones(4, requires_grad=True)
            reduce(x, op=op, **scales).sum().backward()
            assert x.grad.tolist() == [ranks * (hvd.rank() + 1) * 0.5] * 4
        for scatter in (hvd.reducescatter, lambda x, **more: hvd.grouped_reducescatter([x, x], **more)[1]):
            x = torch.ones(4, requires_grad=True)
            scatter(x, op=op, **scales).sum().backward()
            assert x.grad.tolist() == [ranks * (hvd.rank() + 1) * 0.5] * 4


def differentiate_a_reducescatter_while_a_rank_has_joined():
    if hvd.rank():
        x = torch.ones(RANKS, requires_grad=True)
        scattered = hvd.reducescatter(x, op=hvd.Sum, name="late")
        with pytest.raises(ValueError, match="some ranks have joined"):
            scattered.sum().backward()
    hvd.join()


def train_until_data_ends():
    """Train on r + 1 batches on rank r; a joined rank adds zeros."""
    batches = range(hvd.rank() + 1)
    return [hvd.allreduce(torch.ones(2), name="batch", op=hvd.Sum)[0].item() for _ in batches], hvd.join()


def train_with_join():
    """Use an optimizer that continues to exchange gradients after other ranks have joined."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    for _ in range(hvd.rank() + 1):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    last = hvd.join(device=0)
    return weight[0].item(), last


def use_process_sets():
    rank = hvd.rank()
    outer, inner = hvd.add_process_set([0, 2]), hvd.add_process_set(hvd.ProcessSet([1]))
    mine = outer if rank != 1 else inner
    others = [0, 2] if rank != 1 else [1]
    x = torch.full((len(others) * 2,), float(rank))
    assert hvd.allreduce(x, op=hvd.Sum, process_set=mine)[0].item() == sum(others)
    assert hvd.allgather(x[:1], process_set=mine).tolist() == others
    assert hvd.broadcast(x, others[-1], process_set=mine)[0].item() == others[-1]
    assert hvd.alltoall(x[: len(others)], process_set=mine).tolist() == others
    assert hvd.reducescatter(x, op=hvd.Sum, process_set=mine).tolist() == [sum(others)] * 2
    assert hvd.grouped_allreduce([x, x], process_set=mine)[1][0].item() == sum(others) / len(others)
    assert hvd.broadcast_object(rank, others[0], process_set=mine) == others[0]
    assert hvd.allgather_object(rank, process_set=mine) == others
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (3,))
    assert hvd.sparse_allreduce(sparse, op=hvd.Sum, process_set=mine).to_dense().sum().item() == len(others)
    hvd.barrier(process_set=mine)
    y = x.clone().requires_grad_()
    (hvd.allgather(y, process_set=mine).sum() * (rank + 1)).backward()
    assert y.grad.tolist() == [sum(other + 1 for other in others) / len(others)] * len(x)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum, process_set=mine)
    (weight.sum() * (rank + 1)).backward()
    optimizer.step()
    hvd.broadcast_parameters({"weight": weight.detach()}, others[0], process_set=mine)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=hvd.global_process_set).item() == RANKS
    if rank == 1:
        with pytest.raises(ValueError, match="Rank 1 is not in"):
            hvd.allreduce(torch.ones(1), process_set=outer)
    assert hvd.join(process_set=mine) in others
    for each in (outer, inner):
        hvd.remove_process_set(each)
    return weight.item()


def disagree_about_a_group():
    tensors = [torch.ones(2), torch.ones(3 + (hvd.rank() == 2))]
    with pytest.raises(hvd.MismatchError) as caught:
        hvd.grouped_allreduce(tensors, name="pair")
    return str(caught.value)


# The expected results.


def test_groups_are_reduced_in_every_form(group):
    group.run(reduce_in_groups)


def test_reductions_take_compressors(group):
    group.run(reduce_with_compression)


def test_groups_are_gathered(group):
    group.run(gather_in_groups)


def test_each_rank_gets_its_rows_of_a_reduction(group):
    group.run(scatter_sums)


def test_alltoall_sends_a_part_to_every_rank_and_returns_the_received_splits(group):
    group.run(exchange_parts)


def test_gradients_are_those_of_one_process_with_all_inputs(group):
    group.run(differentiate_everything)


def test_gradients_have_the_scales_of_their_own_rank(group):
    group.run(differentiate_with_own_scales)


def test_sparse_sums_and_means_of_integers_are_those_of_dense_tensors(group):
    group.run(add_sparse_integers)


def test_sparse_complex_numbers_have_a_mean(group):
    group.run(add_sparse_complex_numbers)


def test_gradients_have_gradients(group):
    assert group.run(differentiate_twice) == [([81.0, 324.0], [162.0, 324.0])] * RANKS


def test_the_gradient_of_a_broadcast_has_a_gradient_on_every_rank(group):
    # For the root's x = 2: the mean of the ranks' 3 * 3 x^2; then that of 18 x, which only the root's loss contains.
    assert group.run(differentiate_a_broadcast_twice) == [([0.0], [0.0]), ([36.0], [12.0]), ([0.0], [0.0])]


def test_forward_mode_gradients_are_refused(group):
    group.run(differentiate_forward)


def test_sparse_tensors_add_up_for_any_entries_of_the_ranks(group):
    group.run(add_sparse)


def test_the_gradient_of_a_reducescatter_needs_all_ranks(group):
    group.run(differentiate_a_reducescatter_while_a_rank_has_joined)


def test_ranks_may_run_out_of_data_at_different_times(group):
    assert group.run(train_until_data_ends) == [([3.0], 2), ([3.0, 2.0], 2), ([3.0, 2.0, 1.0], 2)]


def test_an_optimizer_continues_when_other_ranks_have_joined(group):
    weights = group.run(train_with_join)
    assert weights == [(-3.0, 2), (-5.0, 2), (-6.0, 2)]


def test_everything_works_on_process_sets(group):
    assert group.run(use_process_sets) == [-4.0, -2.0, -4.0]


def test_a_group_fails_as_a_whole_and_names_the_tensor(group):
    for message in group.run(disagree_about_a_group):
        assert "pair.1" in message


_SCALES = "prescale_factor postscale_factor"
_OF_OPTIMIZERS = "gradient_predivide_factor num_groups groups sparse_as_dense process_set"


@pytest.mark.parametrize(
    ("names", "parameters"),
    [
        ("allreduce", f"tensor average name compression op {_SCALES} process_set"),
        ("allreduce_ allreduce_async allreduce_async_", f"tensor average name op {_SCALES} process_set"),
        ("grouped_allreduce", f"tensors average name compression op {_SCALES} process_set"),
        (
            "grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_",
            f"tensors average name op {_SCALES} process_set",
        ),
        ("reducescatter", f"tensor name compression op process_set {_SCALES}"),
        ("reducescatter_async", f"tensor name op process_set {_SCALES}"),
        ("grouped_reducescatter", f"tensors name compression op process_set {_SCALES}"),
        ("grouped_reducescatter_async", f"tensors name op process_set {_SCALES}"),
        ("sparse_allreduce_async", "tensor name op process_set"),
        ("allgather allgather_async", "tensor name process_set"),
        ("grouped_allgather grouped_allgather_async", "tensors name process_set"),
        ("broadcast broadcast_ broadcast_async broadcast_async_", "tensor root_rank name process_set"),
        ("alltoall alltoall_async", "tensor splits name process_set"),
        ("broadcast_parameters", "params root_rank process_set"),
        ("broadcast_optimizer_state", "optimizer root_rank"),
        ("broadcast_object", "obj root_rank name process_set"),
        ("allgather_object", "obj name"),
        (
            "DistributedOptimizer",
            f"optimizer named_parameters compression backward_passes_per_step op {_OF_OPTIMIZERS}",
        ),
    ],
)
def test_positional_arguments_have_the_order_of_horovod(names, parameters):
    for name in names.split():
        found = inspect.signature(getattr(hvd, name)).parameters.values()
        by_position = [one.name for one in found if one.kind is one.POSITIONAL_OR_KEYWORD]
        assert by_position[: len(parameters.split())] == parameters.split(), name


def reduce_by_position() -> list[float]:
    x = torch.tensor([1.0 + hvd.rank()])
    return [
        hvd.allreduce(x, None, "a", hvd.Compression.fp16, hvd.Sum, 2.0).item(),
        hvd.allreduce(x, None, "b", op=hvd.Sum, compression=hvd.Compression.none).item(),
        hvd.allreduce_(x.clone(), None, "c", hvd.Sum, 1.0, 3.0).item(),
        hvd.synchronize(hvd.allreduce_async(x, None, "d", hvd.Max)).item(),
    ]


def test_reductions_take_their_arguments_by_position(group):
    total = float(sum(range(1, group.size + 1)))
    assert group.run(reduce_by_position)[0] == [2.0 * total, total, 3.0 * total, float(group.size)]


def test_compression_cannot_be_passed_twice(alone):
    with pytest.raises(TypeError, match="compression"):
        hvd.allreduce(torch.ones(1), None, "a", hvd.Compression.fp16, compression=hvd.Compression.none)


def test_every_form_has_the_parameters_and_the_documentation_of_the_collective():
    for name in hvd.__all__:
        if name.rstrip("_").removesuffix("_async") not in {"allreduce", "grouped_allreduce", "broadcast", "alltoall"}:
            continue
        form, plain = getattr(hvd, name), getattr(hvd, name.rstrip("_").removesuffix("_async"))
        assert form.__name__ == name
        assert pickle.loads(pickle.dumps(form)) is form
        assert set(inspect.signature(form).parameters) == set(inspect.signature(plain).parameters)
        assert "Args:\n    tensor" in form.__doc__
        assert ("Handle[" in str(inspect.signature(form).return_annotation)) == ("_async" in name)
    assert str(inspect.signature(hvd.allreduce_async).return_annotation) == "Handle[torch.Tensor]"
    assert str(inspect.signature(hvd.alltoall).return_annotation) == "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"


def test_a_part_of_a_program_can_be_recorded(alone, tmp_path):
    hvd.start_timeline(str(tmp_path / "trace.json"))
    hvd.allreduce(torch.ones(2), name="seen")
    hvd.stop_timeline()
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(2), name="unseen")
    events = (tmp_path / "trace.json").read_text()
    assert "seen" in events
    assert "unseen" not in events


def test_build_features_can_be_queried(alone):
    assert not hvd.mpi_enabled()
    assert (hvd.gloo_built(), hvd.gloo_enabled(), hvd.rocm_built(), hvd.ddl_built(), hvd.ccl_built()) == (False,) * 5
    assert hvd.cuda_built() == torch.cuda.is_available()
    assert hvd.mpi_threads_supported() == hvd.mpi_built()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hvd.grouped_allreduce([]), "takes a list of at least one tensor"),
        (lambda: hvd.grouped_allreduce(torch.ones(2)), "takes a list of at least one tensor"),
        (lambda: hvd.reducescatter(torch.tensor(1.0), name="x"), "Tensor 'x' is a scalar, but a reducescatter splits"),
        (lambda: hvd.alltoall(torch.ones(2), [1.5]), "must hold one number of rows, at least 0, per rank"),
        (lambda: hvd.alltoall(torch.ones(2), [-2]), "must hold one number of rows, at least 0, per rank"),
        (lambda: hvd.allreduce(torch.ones(2), name=5), "name of a collective must be a string, got 5"),
        (lambda: hvd.allgather(torch.ones(2), name=b"x"), "name of a collective must be a string, got b'x'"),
        (lambda: hvd.allgather(torch.ones(2), name="\udcff"), r"must be valid Unicode, got '\\udcff'"),
        (lambda: hvd.alltoall(torch.ones(2), [2**70]), "must hold one number of rows, at least 0, per rank"),
        (lambda: hvd.allreduce(torch.ones(2), prescale_factor=10**400), "prescale factor must be within the range"),
        (lambda: hvd.add_process_set([2**70]), "ranks must be at most 2147483647"),
        (lambda: hvd.add_process_set(3), r"ProcessSet\(3\) is invalid: pass a list of ranks"),
        (lambda: hvd.remove_process_set(None), "must be an hvd.ProcessSet, got None"),
        (lambda: hvd.allreduce(torch.ones(2), op="mean"), "must be Average, Sum, .* of hvd, got 'mean'"),
        (lambda: hvd.allreduce(torch.ones(2), prescale_factor="2"), "prescale factor must be a number, got '2'"),
        (
            lambda: hvd.grouped_allreduce([torch.ones(2)], postscale_factor=None),
            "postscale factor must be a number, got None",
        ),
        (lambda: hvd.allreduce([1.0]), "takes tensors, got \\[1.0\\]"),
        (lambda: hvd.broadcast_(3.0, 0), "takes tensors, got 3.0"),
        (lambda: hvd.allreduce(torch.ones(2), process_set=1), "must be an hvd.ProcessSet or None, got 1"),
        (lambda: hvd.allreduce(torch.ones(2), compression="fp16"), "must be one of hvd.Compression.*got 'fp16'"),
        (
            lambda: hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), compression=16),
            "must be one of hvd.Compression.*got 16",
        ),
        (lambda: hvd.sparse_allreduce(torch.ones(2)), "has layout torch.strided, but must have torch.sparse_coo"),
        (lambda: hvd.sparse_allreduce(torch.eye(2).to_sparse(), op=hvd.Max), "cannot be combined with op=max"),
        (lambda: hvd.reducescatter(torch.ones(2, requires_grad=True), op=hvd.Min).sum().backward(), "has no gradient"),
    ],
)
def test_invalid_calls_are_rejected(alone, call, message):
    with pytest.raises(ValueError, match=message):
        call()
