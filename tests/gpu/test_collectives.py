"""Collectives of CUDA tensors by NCCL, and through the CPU, on real devices."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.comm import session
from sparkhvd.errors import SparkHvdError
from tests.gpu.devices import GPUS, needs_gpu, needs_two_gpus
from tests.ranks import RankGroup
from tests.unit.torch.ops.test_devices import CASES

pytestmark = needs_gpu


# What the ranks do. Each has the device of its number.


def use_own_device():
    torch.cuda.set_device(hvd.rank() % torch.cuda.device_count())


def reduce_in_overlapping_sets(steps):
    """Sets {0, 1}, {1, 2}... and all ranks at once, submitted in another order on every rank."""
    use_own_device()
    rank, size = hvd.rank(), hvd.size()
    sets = [hvd.add_process_set([first, (first + 1) % size]) for first in range(size if size > 2 else 1)]
    groups = [hvd.global_process_set, *(one for one in sets if one.included())]
    found = []
    for step in range(steps):
        turned = groups[rank % len(groups) :] + groups[: rank % len(groups)]
        handles = {}
        for group in turned:
            mine = torch.full((1 << 16,), float(rank + 1), device="cuda")
            handles[group] = hvd.allreduce_async(mine, op=hvd.Sum, name=f"step.{step}", process_set=group)
        found += [hvd.synchronize(handles[group])[-1].item() for group in groups]
    expected = [sum(one + 1 for one in (group.ranks or range(size))) for group in groups] * steps
    torch.cuda.synchronize()
    for one in sets:
        hvd.remove_process_set(one)
    return found == expected


def leave_right_after_a_broadcast():
    use_own_device()
    values = torch.full((1 << 22,), float(hvd.rank()), device="cuda")
    if hvd.rank() > 0:
        torch.cuda._sleep(1_000_000_000)  # cycles: this rank receives long after the root has sent
    handle = hvd.broadcast_async_(values, 0, name="last")
    result = hvd.synchronize(handle)
    session.shutdown()
    return bool(result.eq(0.0).all())


def use_one_device_with_all_ranks():
    torch.cuda.set_device(0)
    try:
        hvd.allreduce(torch.ones(3, device="cuda"), op=hvd.Sum)
    except SparkHvdError as error:
        return str(error)
    return ""


def reduce_through_the_cpu():
    use_own_device()
    reduced = hvd.allreduce(torch.full((5,), float(hvd.rank() + 1), device="cuda"), op=hvd.Sum)
    return reduced.device.type, reduced.tolist(), session.current().counters()["on_device"]


# What the tests expect of them.


FORK = """
import os, torch
from sparkhvd.comm import features
assert features.cuda_built()
if os.fork() == 0:
    os._exit(0 if torch.ones(1, device="cuda").item() == 1.0 else 1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, "the child cannot use CUDA"
"""


def test_children_of_a_process_that_has_counted_devices_may_use_them():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)


@needs_two_gpus
@pytest.mark.parametrize("ranks", sorted({2, min(len(GPUS), 8)}))
def test_process_sets_and_the_job_do_not_block_each_other(ranks):
    with RankGroup(ranks, imports=("sparkhvd.torch",), gpu_operations="nccl", collective_timeout=60.0) as group:
        assert group.run(reduce_in_overlapping_sets, 20) == [True] * ranks


@needs_two_gpus
def test_every_collective_works_between_devices():
    with RankGroup(2, imports=("sparkhvd.torch",), gpu_operations="nccl", collective_timeout=60.0) as group:
        for case in CASES:
            group.run(case)


@needs_two_gpus
def test_a_root_that_leaves_first_does_not_fail_the_others():
    with RankGroup(2, imports=("sparkhvd.torch",), gpu_operations="nccl", collective_timeout=60.0) as group:
        assert group.run(leave_right_after_a_broadcast) == [True, True]


def test_two_ranks_on_one_gpu_are_refused_with_a_remedy():
    with RankGroup(2, imports=("sparkhvd.torch",), gpu_operations="nccl", collective_timeout=60.0) as group:
        for message in group.run(use_one_device_with_all_ranks):
            assert "every rank needs a GPU of its own" in message
            assert "SPARKHVD_GPU_OPERATIONS=staged" in message


def test_two_ranks_on_one_gpu_reduce_through_the_cpu():
    with RankGroup(2, imports=("sparkhvd.torch",), gpu_operations="staged") as group:
        assert group.run(reduce_through_the_cpu) == [("cuda", [3.0] * 5, 0)] * 2
