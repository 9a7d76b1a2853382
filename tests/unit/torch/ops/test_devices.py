"""CUDA tensors through NCCL; without a device, only its selection is tested."""

from __future__ import annotations

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.comm import session
from sparkhvd.errors import ConfigError
from sparkhvd.torch.ops.devices import nccl_supports, scale, scaled, uses_nccl
from tests.ranks import RankGroup

_needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def on_device() -> int:
    return session.current().counters()["on_device"]


def test_nccl_support_depends_only_on_dtype_and_operator():
    assert all(nccl_supports(dtype, hvd.Average) for dtype in (torch.float16, torch.bfloat16, torch.float64))
    assert nccl_supports(torch.int64, hvd.Max)
    assert not nccl_supports(torch.int64, hvd.Average)
    assert not nccl_supports(torch.int16, hvd.Sum)
    assert not nccl_supports(torch.bool, hvd.Sum)
    assert not nccl_supports(torch.float32, hvd.Adasum)
    assert nccl_supports(torch.bool, None)
    assert not nccl_supports(torch.complex64, None)


def test_cpu_tensors_do_not_use_nccl(alone):
    assert not uses_nccl([torch.ones(2)], None)


@pytest.mark.parametrize("factor", [1.0, 0.5, -2.5])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_scaling_outside_the_core_equals_scaling_in_the_core(alone, dtype, factor):
    values = torch.tensor([-7, -1, 0, 3, 100], dtype=dtype)
    by_core = hvd.allreduce(values, op=hvd.Sum, prescale_factor=factor)
    assert torch.equal(scaled(values, factor), by_core)
    scale(values, factor)
    assert torch.equal(values, by_core)


# Functions that a rank runs on tensors of its device.


def collectives_on_devices():
    rank, size = hvd.rank(), hvd.size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    mine = torch.full((2 * size, 3), float(rank + 1), device="cuda")
    total = size * (size + 1) / 2
    assert hvd.allreduce(mine, op=hvd.Sum).eq(total).all()
    assert hvd.allreduce(mine).eq(total / size).all()
    assert hvd.allreduce(mine, op=hvd.Max, prescale_factor=2.0, postscale_factor=0.5).eq(size).all()
    assert mine.eq(rank + 1).all()
    assert hvd.allreduce_(mine.clone(), op=hvd.Sum, compression=hvd.Compression.fp16).eq(total).all()
    grouped = hvd.grouped_allreduce([mine, mine.T], op=hvd.Sum)
    assert all(each.eq(total).all() for each in grouped)
    gathered = hvd.allgather(mine[: rank + 1])
    assert gathered[:, 0].tolist() == [float(r + 1) for r in range(size) for _ in range(r + 1)]
    assert hvd.broadcast(mine, size - 1).eq(size).all()
    flags = torch.tensor([rank == 0], device="cuda")
    assert hvd.broadcast_(flags, 0).item() is True
    came, rows = hvd.alltoall(mine, torch.full((size,), 2))
    assert came[:, 0].tolist() == [float(r + 1) for r in range(size) for _ in range(2)]
    assert rows.tolist() == [2] * size
    assert hvd.reducescatter(mine, op=hvd.Sum).eq(total).all()
    assert hvd.allgather(mine[:0]).shape == (0, 3)
    before = on_device()
    assert before >= 10
    # These tensors are staged through the CPU.
    assert hvd.allreduce(torch.tensor([rank], device="cuda")).device == mine.device
    assert hvd.allreduce(mine, op=hvd.Adasum).device == mine.device
    assert on_device() == before
    torch.cuda.synchronize()


def gradients_on_devices():
    torch.cuda.set_device(hvd.rank() % torch.cuda.device_count())
    weight = torch.nn.Parameter(torch.zeros(3, device="cuda"))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), gradient_predivide_factor=2.0)
    before = on_device()
    for _ in range(3):
        optimizer.zero_grad()
        (weight.sum() * 2).backward()
        optimizer.step()
    assert on_device() >= before + 3
    assert weight.tolist() == [-6.0] * 3


def results_in_the_order_of_streams():
    torch.cuda.set_device(hvd.rank() % torch.cuda.device_count())
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        data = torch.zeros(1 << 20, device="cuda")
        for _ in range(200):
            data += 1
        handle = hvd.allreduce_async(data, op=hvd.Sum, name="ordered")
        result = hvd.synchronize(handle) * 2
        assert hvd.synchronize(handle) is hvd.synchronize(handle)
    torch.cuda.current_stream().wait_stream(side)
    assert result.eq(400 * hvd.size()).all()


def ends_at_different_times():
    torch.cuda.set_device(hvd.rank() % torch.cuda.device_count())
    for step in range(hvd.rank()):
        total = hvd.allreduce(torch.ones(3, device="cuda"), op=hvd.Sum, name=f"step {step}")
        assert total.eq(hvd.size() - 1 - step).all()
    assert hvd.join() == hvd.size() - 1


CASES = (collectives_on_devices, gradients_on_devices, results_in_the_order_of_streams, ends_at_different_times)


def refuses_a_second_device():
    hvd.allreduce(torch.ones(2, device="cuda:0"))
    try:
        hvd.allreduce(torch.ones(2, device="cuda:1"))
    except ConfigError as error:
        return str(error)
    return ""


# CUDA and NCCL keep files open for the life of a process, so even a single rank is a separate process.


@_needs_device
def test_one_rank_works_with_nccl():
    with RankGroup(1, imports=("sparkhvd.torch",), gpu_operations="nccl") as ranks:
        for case in CASES:
            ranks.run(case)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_second_device_of_a_rank_is_refused():
    with RankGroup(1, imports=("sparkhvd.torch",), gpu_operations="nccl") as ranks:
        (message,) = ranks.run(refuses_a_second_device)
        assert "with NCCL a rank uses one device" in message
