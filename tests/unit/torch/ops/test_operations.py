from __future__ import annotations

import ctypes
import gc
import weakref

import numpy as np
import psutil
import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.comm import interface
from sparkhvd.errors import ConfigError, MismatchError, NotInitializedError
from tests.ranks import TORCH, RankGroup

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


@pytest.fixture(
    scope="module", params=[pytest.param(2, id="2 ranks", marks=pytest.mark.soak), pytest.param(3, id="3 ranks")]
)
def group(request):
    with RankGroup(request.param, imports=TORCH) as started:
        yield started


# Functions that the ranks run.


def reduce_every_dtype():
    """Return small integers, so that every dtype holds the sum exactly."""
    ranks = hvd.size()
    for dtype in DTYPES:
        for shape in [(), (0,), (5,), (3, 4)]:
            mine = torch.full(shape, hvd.rank() + 1).to(dtype)
            for op, want in [(hvd.Sum, ranks * (ranks + 1) // 2), (hvd.Min, 1), (hvd.Max, ranks)]:
                result = hvd.allreduce(mine, op=op)
                assert result.dtype == dtype, (result.dtype, dtype)
                assert torch.equal(result, torch.full(shape, want).to(dtype)), (dtype, shape, op, result)
            assert torch.equal(mine, torch.full(shape, hvd.rank() + 1).to(dtype)), "the input must not change"


def reduce_in_every_form():
    mean = (hvd.size() - 1) / 2
    mine = torch.full((4,), float(hvd.rank()))
    assert hvd.allreduce(mine).tolist() == [mean] * 4
    assert hvd.synchronize(hvd.allreduce_async(mine, name="form.async")).tolist() == [mean] * 4
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=5.0)
    assert scaled.tolist() == [10 * mean * hvd.size()] * 4
    assert hvd.allreduce(mine + 1, op=hvd.Product).tolist() == [float(np.prod(np.arange(1, hvd.size() + 1)))] * 4
    handle = hvd.allreduce_async_(mine.clone(), name="form.in place")
    result = hvd.synchronize(handle)
    assert hvd.poll(handle)
    assert result.tolist() == [mean] * 4
    assert hvd.allreduce_(mine) is mine
    assert mine.tolist() == [mean] * 4


def growth_of_memory_with_new_tensors():
    """Reduce 800 MB of new tensors, unnamed, and return by how many bytes the memory of this process has grown."""
    process, sizes = psutil.Process(), []
    ctypes.CDLL(None).mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: tensors share a heap with small blocks
    for step in range(220):
        hvd.allreduce_(torch.ones(1_000_000))
        if step in {19, 219}:
            sizes.append(process.memory_info().rss)
    return sizes[1] - sizes[0]


def free_tensors_that_refer_to_their_handles():
    alive = []
    for number in range(3):
        tensor = torch.ones(1000)
        tensor.handle = hvd.allreduce_async_(tensor, name=f"cycle.{number}")
        tensor.handle.wait()
        alive.append(weakref.ref(tensor))
        del tensor
    gc.collect()
    return [reference() is not None for reference in alive]


def communicate_lazy_views():
    """Communicate views that torch negates or conjugates only when their values are read."""
    ranks, rank = hvd.size(), hvd.rank()
    mine = torch._neg_view(torch.arange(4.0) + rank)
    want = -(torch.arange(4.0) * ranks + sum(range(ranks)))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), want)
    assert torch.equal(hvd.allgather(mine), torch.cat([-(torch.arange(4.0) + other) for other in range(ranks)]))
    assert torch.equal(hvd.broadcast(mine, 1), -(torch.arange(4.0) + 1))
    assert torch.equal(hvd.alltoall(torch._neg_view(torch.arange(float(ranks)))), torch.full((ranks,), -float(rank)))
    assert torch.equal(hvd.reducescatter(torch._neg_view(torch.ones(ranks)), op=hvd.Sum), torch.tensor([-float(ranks)]))
    imaginary = torch.complex(torch.ones(1), torch.ones(1)).conj().imag
    assert torch.equal(hvd.allreduce(imaginary, op=hvd.Sum), torch.tensor([-float(ranks)]))
    hvd.allreduce_(mine, op=hvd.Sum)
    assert torch.equal(mine, want)
    number = torch.complex(torch.full((2,), float(rank)), torch.ones(2))
    number = number.conj() if rank == 0 else number
    hvd.broadcast_parameters({"number": number}, root_rank=0)
    assert torch.equal(number.resolve_conj(), torch.complex(torch.zeros(2), -torch.ones(2)))


def overwrite_values_saved_by_autograd():
    """Autograd must refuse a gradient from values that a collective has overwritten."""
    forms = [
        hvd.allreduce_,
        lambda tensor: hvd.allreduce_(tensor, compression=hvd.Compression.bf16),
        lambda tensor: hvd.synchronize(hvd.allreduce_async_(tensor, name="saved")),
        lambda tensor: hvd.grouped_allreduce_([tensor]),
        lambda tensor: hvd.broadcast_(tensor, 0),
    ]
    for change in forms:
        weight, saved = torch.ones(2, requires_grad=True), torch.ones(2)
        output = weight * saved
        change(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def reduce_strided():
    whole = torch.arange(12.0).reshape(3, 4) * (hvd.rank() + 1)
    factor = hvd.size() * (hvd.size() + 1) / 2
    result = hvd.allreduce(whole.T, op=hvd.Sum)
    assert torch.equal(result, torch.arange(12.0).reshape(3, 4).T * factor)


def gather_every_dtype():
    for dtype in DTYPES:
        mine = torch.full((hvd.rank(), 2), hvd.rank()).to(dtype)
        want = torch.cat([torch.full((rank, 2), rank).to(dtype) for rank in range(hvd.size())])
        assert torch.equal(hvd.allgather(mine), want)
        assert torch.equal(hvd.synchronize(hvd.allgather_async(mine, name="gather")), want)


def broadcast_every_dtype():
    root = hvd.size() - 1
    for dtype in DTYPES:
        mine = torch.full((3,), hvd.rank() + 1).to(dtype)
        want = torch.full((3,), hvd.size()).to(dtype)
        assert torch.equal(hvd.broadcast(mine, root), want)
        assert torch.equal(hvd.synchronize(hvd.broadcast_async(mine, root)), want)
        assert torch.equal(mine, torch.full((3,), hvd.rank() + 1).to(dtype)), "the input must not change"
        assert hvd.broadcast_(mine, root) is mine
        assert torch.equal(mine, want)
        assert torch.equal(hvd.synchronize(hvd.broadcast_async_(mine, 0)), want)


def differentiate():
    """Differentiate losses of `rank + 1` times a weighted sum of the result, so that gradients differ between ranks."""
    factor, ranks = hvd.rank() + 1.0, hvd.size()
    mean = (ranks + 1) / 2
    weights = torch.tensor([1.0, 2.0, 3.0])

    def gradient_of(operation, rows=3):
        mine = torch.ones(rows, requires_grad=True)
        result = operation(mine)
        (result * (weights if len(result) == 3 else torch.arange(1.0, len(result) + 1)) * factor).sum().backward()
        return mine.grad

    assert torch.allclose(gradient_of(lambda t: hvd.allreduce(t, op=hvd.Sum)), weights * mean * ranks)
    assert torch.allclose(gradient_of(hvd.allreduce), weights * mean)
    assert torch.allclose(gradient_of(lambda t: hvd.allreduce(t, prescale_factor=3.0)), weights * mean * 3)
    want = weights * mean if hvd.rank() == 1 else torch.zeros(3)
    assert torch.allclose(gradient_of(lambda t: hvd.broadcast(t, 1)), want)
    rows = hvd.rank() + 1
    before = hvd.rank() * (hvd.rank() + 1) // 2
    assert torch.allclose(gradient_of(hvd.allgather, rows), torch.arange(before + 1.0, before + rows + 1) * mean)


def ask_for_the_gradient_of_a_maximum():
    mine = torch.ones(3, requires_grad=True)
    with pytest.raises(ConfigError, match="op=max has no gradient"):
        hvd.allreduce(mine, op=hvd.Max).sum().backward()


def disagree():
    with pytest.raises(MismatchError) as caught:
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="disputed")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    return str(caught.value)


def see_the_world():
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


# The expected results.


def test_autograd_refuses_gradients_from_values_that_a_collective_has_overwritten(group):
    group.run(overwrite_values_saved_by_autograd)


def test_collectives_without_names_reuse_the_memory_of_earlier_tensors(group):
    assert max(group.run(growth_of_memory_with_new_tensors)) < 200 << 20


def test_a_tensor_that_refers_to_its_handle_is_freed_with_it(group):
    assert group.run(free_tensors_that_refer_to_their_handles) == [[False] * 3] * group.size


def test_lazily_negated_or_conjugated_views_are_communicated_by_value(group):
    group.run(communicate_lazy_views)


def test_every_dtype_is_reduced_into_a_new_tensor_of_its_shape(group):
    group.run(reduce_every_dtype)


def test_mean_sum_product_and_scales_are_correct_in_every_form(group):
    group.run(reduce_in_every_form)


def test_a_strided_tensor_is_copied_where_the_result_is_new(group):
    group.run(reduce_strided)


def test_every_dtype_is_gathered_with_different_numbers_of_rows(group):
    group.run(gather_every_dtype)


def test_every_dtype_is_broadcast_from_any_root(group):
    group.run(broadcast_every_dtype)


def test_gradients_flow_through_allreduce_broadcast_and_allgather(group):
    group.run(differentiate)


def test_a_maximum_has_no_gradient(group):
    group.run(ask_for_the_gradient_of_a_maximum)


def test_a_disagreement_reaches_every_rank(group):
    for message in group.run(disagree):
        assert "disputed" in message


def test_ranks_and_sizes_are_those_of_the_launcher(group):
    assert group.run(see_the_world) == [(r, group.size, r, group.size, 0, 1) for r in range(group.size)]


@pytest.mark.parametrize(
    "call",
    [hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, hvd.barrier, lambda: hvd.allreduce(torch.ones(1))],
)
def test_calls_before_init_raise_an_error_with_the_next_step(call):
    assert not hvd.is_initialized()
    with pytest.raises(NotInitializedError, match=r"call hvd\.init\(\)") as caught:
        call()
    assert isinstance(caught.value, ValueError), "as in Horovod"


def test_a_job_of_one_rank_needs_no_launcher(alone):
    assert see_the_world() == (0, 1, 0, 1, 0, 1)
    assert hvd.is_homogeneous()
    reduce_every_dtype()
    reduce_strided()
    gather_every_dtype()
    broadcast_every_dtype()
    hvd.barrier()


def test_average_is_deprecated_but_works(alone):
    with pytest.warns(DeprecationWarning, match=r"pass op=hvd\.Average or op=hvd\.Sum"):
        assert hvd.allreduce(torch.ones(2), average=False).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="are both set"):
        hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)


def test_an_in_place_form_refuses_a_strided_tensor_by_name(alone):
    strided = torch.ones(3, 4).T
    message = r"Tensor 'weights' of shape \(4, 3\) and strides \(1, 4\) is not contiguous"
    with pytest.raises(ValueError, match=message):
        hvd.allreduce_(strided, name="weights")
    with pytest.raises(ValueError, match=message):
        hvd.broadcast_(strided, 0, name="weights")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64)),
            "has dtype torch.complex64; collectives take bool",
        ),
        (lambda: hvd.allreduce(torch.eye(2).to_sparse()), "layout torch.sparse_coo; collectives take dense tensors"),
        (lambda: hvd.allreduce(torch.ones(2, device="meta")), "on the meta device"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "needs at least one dimension"),
        (lambda: hvd.broadcast(torch.ones(2), 1), "The root rank must be"),
        (lambda: hvd.poll(7), "7 is not a handle"),
        (lambda: hvd.synchronize(None), "None is not a handle"),
    ],
)
def test_invalid_calls_raise_one_clear_error(alone, call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_tensors_are_copied_through_pinned_memory_and_return_to_their_device(alone):
    mine = torch.arange(12.0, device="cuda").reshape(3, 4)
    for result in (
        hvd.allreduce(mine, op=hvd.Sum),
        hvd.allreduce_(mine.clone()),
        hvd.allreduce(mine.T).T,
        hvd.allgather(mine),
        hvd.broadcast(mine, 0),
        hvd.broadcast_(mine.clone(), 0),
        hvd.alltoall(mine),
        hvd.reducescatter(mine),
    ):
        assert result.device == mine.device
        assert torch.equal(result, mine)
    weight = torch.nn.Parameter(torch.zeros(3, device="cuda"))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=hvd.Compression.fp16)
    (weight.sum() * 2).backward()
    optimizer.step()
    assert weight.tolist() == [-2.0] * 3


def test_the_module_exports_the_common_interface_without_duplicates():
    assert set(interface.__all__) < set(hvd.__all__) <= set(dir(hvd))
    assert len(set(hvd.__all__)) == len(hvd.__all__)
    assert all(getattr(hvd, name) is getattr(interface, name) for name in interface.__all__)
    assert all(getattr(hvd, name) is not None for name in hvd.__all__)
