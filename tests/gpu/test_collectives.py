"""Collectives of CUDA tensors by NCCL, and through the CPU, on real devices.

Where the machine has fewer GPUs than a group has ranks, the ranks share them.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.comm import session
from sparkhvd.errors import SparkHvdError
from tests.gpu.devices import GPUS, needs_gpu, take_device
from tests.ranks import RankGroup
from tests.unit.torch.ops.test_devices import CASES

pytestmark = needs_gpu


# Functions that the ranks run.


def reduce_in_overlapping_sets(steps):
    """Reduce in the sets {0, 1}, {1, 2}... and in all ranks at once, in a different order on every rank."""
    take_device()
    rank, size = hvd.rank(), hvd.size()
    sets = [hvd.add_process_set([first, (first + 1) % size]) for first in range(size)]
    groups = [hvd.global_process_set, *(one for one in sets if one.included())]
    sums = []
    for step in range(steps):
        turned = groups[rank % len(groups) :] + groups[: rank % len(groups)]
        handles = {}
        for group in turned:
            mine = torch.full((1 << 16,), float(rank + 1), device="cuda")
            handles[group] = hvd.allreduce_async(mine, op=hvd.Sum, name=f"step.{step}", process_set=group)
        sums += [hvd.synchronize(handles[group])[-1].item() for group in groups]
    expected = [sum(one + 1 for one in (group.ranks or range(size))) for group in groups] * steps
    torch.cuda.synchronize()
    for one in sets:
        hvd.remove_process_set(one)
    return sums == expected


def leave_right_after_a_broadcast():
    take_device()
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
    take_device()
    reduced = hvd.allreduce(torch.full((5,), float(hvd.rank() + 1), device="cuda"), op=hvd.Sum)
    return reduced.device.type, reduced.tolist(), session.current().counters()["on_device"]


def run_collective(tensor, name, *, kind, op, root, splits):
    if kind == "grouped":
        return hvd.grouped_allreduce([tensor, tensor[:1] + 1, tensor.flatten()], op=op, name=name)
    if kind == "alltoall":
        return hvd.alltoall(tensor, splits, name=name)
    if kind == "allgather":
        return [hvd.allgather(tensor, name=name)]
    if kind == "broadcast":
        return [hvd.broadcast(tensor, root, name=name)]
    return [getattr(hvd, kind)(tensor, op=op, name=name)]


def compare_with_the_cpu(seed):
    """Run random collectives of random dtypes and shapes with NCCL, and the same on CPU tensors."""
    take_device()
    random = np.random.default_rng(seed)  # the same decisions on all ranks
    own = np.random.default_rng((seed, hvd.rank()))
    size = hvd.size()
    for number in range(60):
        kind = random.choice(["allreduce", "grouped", "allgather", "broadcast", "alltoall", "reducescatter"])
        dtype = random.choice(["float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "int8"])
        shape = tuple(int(extent) for extent in random.integers(1, [40, 9, 700][: random.integers(1, 4)]))
        whole = not dtype.startswith(("float", "bfloat"))
        op = (
            [hvd.Sum, hvd.Max, hvd.Min, hvd.Product][random.integers(4)]
            if whole or random.random() < 0.7
            else hvd.Average
        )
        rows = int(own.integers(0, 8)) if kind in {"allgather", "alltoall"} else shape[0]
        numbers = own.integers(0, 3, (rows, *shape[1:]))
        host = torch.from_numpy(numbers).to(getattr(torch, dtype))
        if random.random() < 0.3 and host.dim() > 1:
            host = host.transpose(0, -1).contiguous().transpose(0, -1)  # strided
        splits = own.multinomial(rows, [1 / size] * size)
        root = int(random.integers(size))

        act = partial(run_collective, kind=kind, op=op, root=root, splits=torch.from_numpy(splits))
        expected = act(host, f"host {number}")
        found = act(host.cuda(), f"device {number}")
        for one, other in zip(found, expected, strict=True):
            where = f"{number}: {kind} of {dtype} {tuple(host.shape)} by {op}"
            assert one.shape == other.shape, where
            exact = op in {hvd.Max, hvd.Min} or whole or kind in {"allgather", "broadcast", "alltoall"}
            torch.testing.assert_close(one.cpu(), other, **({"rtol": 0, "atol": 0} if exact else {}), msg=where)
    return session.current().counters()["on_device"]


def train(on_device, settings):
    """Return the weights and running statistics after a few steps of a network on this rank's rows."""
    take_device()
    torch.manual_seed(3)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, bias=False),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 3),
    )
    network = hvd.SyncBatchNorm.convert_sync_batchnorm(network)
    device = torch.device("cuda" if on_device else "cpu")
    network.to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, network.named_parameters(), **settings)
    hvd.broadcast_parameters(network.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    passes = settings.get("backward_passes_per_step", 1)
    for step in range(6 * passes):
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        rows = torch.randn(5, 2, 6, 6, generator=generator, dtype=torch.float32)
        labels = torch.randint(3, (5,), generator=generator)
        torch.nn.functional.cross_entropy(network(rows.to(device)), labels.to(device)).backward()
        if step % passes == passes - 1:
            optimizer.step()
            optimizer.zero_grad()
    return {name: values.detach().cpu().numpy() for name, values in network.state_dict().items()}


def train_in_mixed_precision():
    take_device()
    torch.manual_seed(3)
    weight = torch.nn.Linear(16, 1).cuda()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weight.parameters(), lr=0.05), weight.named_parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    losses = []
    for step in range(30):
        rows = torch.randn(32, 16, generator=torch.Generator().manual_seed(step * 2 + hvd.rank())).cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.mse_loss(weight(rows), rows.sum(1, keepdim=True))
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, weight.weight.detach().cpu().numpy()


def sum_arrays_of_other_libraries():
    """Return a sum of an array on the device for every library that is installed here."""
    import sparkhvd.numpy as hvd_numpy  # noqa: PLC0415

    take_device()
    sums = {"torch": hvd_numpy.allreduce(torch.full((3,), hvd.rank() + 1.0, device="cuda"), op=hvd.Sum)}
    try:
        import cupy  # noqa: PLC0415
    except ImportError:
        pass
    else:
        sums["cupy"] = hvd_numpy.allreduce(cupy.full((3,), hvd.rank() + 1.0), op=hvd.Sum)
    try:
        import jax  # noqa: PLC0415
    except ImportError:
        pass
    else:
        if jax.default_backend() == "gpu":
            sums["jax"] = hvd_numpy.allreduce(jax.numpy.full((3,), hvd.rank() + 1.0), op=hvd.Sum)
    return {library: np.asarray(total).tolist() for library, total in sums.items()}


def train_embeddings(on_device):
    take_device()
    torch.manual_seed(3)
    table = torch.nn.Embedding(50, 4, sparse=True).to("cuda" if on_device else "cpu")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters())
    for step in range(10):
        rows = torch.randint(50, (6,), generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
        optimizer.zero_grad()
        table(rows.to(table.weight.device)).square().sum().backward()
        optimizer.step()
    return table.weight.detach().cpu().numpy()


def reduce_many_at_once(seed):
    """Submit operations in a different order on every rank, and wait for them in another order."""
    take_device()
    own = np.random.default_rng((seed, hvd.rank()))
    side = torch.cuda.Stream()
    handles = {}
    for number in own.permutation(200):
        with torch.cuda.stream(side if number % 2 else torch.cuda.default_stream()):
            values = torch.zeros(1 + 997 * int(number), device="cuda")
            for _ in range(int(number) % 5):
                values += hvd.rank() + 1
            handles[number] = hvd.allreduce_async(values, op=hvd.Sum, name=f"many {number}")
    total = sum(range(1, hvd.size() + 1))
    wrong = []
    for number in own.permutation(200):
        result = hvd.synchronize(handles.pop(number))
        if not result.eq(total * (int(number) % 5)).all():
            wrong.append(int(number))
    return wrong


def gather_more_than_fits():
    take_device()
    free, _ = torch.cuda.mem_get_info()
    rows = torch.ones(int(free / hvd.size() / 4 * 0.7), device="cuda")
    try:
        hvd.allgather(rows)
        torch.cuda.synchronize()
    except SparkHvdError as error:
        return str(error)
    return "no error"


def capture_a_collective():
    take_device()
    values = torch.ones(8, device="cuda")
    hvd.allreduce(values, op=hvd.Sum, name="before")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            hvd.allreduce(values, op=hvd.Sum, name="captured")
    except Exception as error:  # noqa: BLE001  (the test checks the message)
        return f"{type(error).__name__}: {error}"
    return "no error"


def gather_often():
    """Return the bytes by which the used memory of the device grows in later rounds."""
    take_device()
    used = []
    for _ in range(6):
        for step in range(100):
            rows = torch.ones(1 << 16, 1 + (step + hvd.rank()) % 3, device="cuda")
            hvd.allgather(rows.reshape(-1))
            hvd.alltoall(rows[: hvd.size(), :1])
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    return used[-1] - used[1]


def reduce_until_an_error():
    take_device()
    values = torch.ones(1 << 20, device="cuda")
    began = time.monotonic()
    try:
        for step in range(100_000):
            hvd.allreduce(values, op=hvd.Max, name="loop")
            if step % 10 == 0:
                torch.cuda.synchronize()
    except SparkHvdError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def reduce_once_and_wait(late):
    take_device()
    hvd.allreduce(torch.ones(3, device="cuda"), name="first")
    if hvd.rank() == late:
        time.sleep(12)
        return ""
    try:
        hvd.allreduce(torch.ones(3, device="cuda"), name="second")
        torch.cuda.synchronize()
    except SparkHvdError as error:
        return str(error)
    return "no error"


# The expected results.


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


@pytest.mark.parametrize("ranks", sorted({3, 4, min(len(GPUS), 8)} - {0, 1, 2}))
def test_process_sets_and_the_job_do_not_block_each_other(ranks):
    with RankGroup(ranks, imports=("sparkhvd.torch",), gpu_operations="nccl", collective_timeout=60.0) as group:
        assert group.run(reduce_in_overlapping_sets, 20) == [True] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective_works_between_devices(ranks):
    with RankGroup(ranks, imports=("sparkhvd.torch",), gpu_operations="nccl", collective_timeout=60.0) as group:
        group.run(take_device)
        for case in CASES:
            group.run(case)


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


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_of_nccl_equal_those_of_cpu_tensors(ranks):
    with RankGroup(ranks, imports=("sparkhvd.torch",), gpu_operations="nccl", collective_timeout=60.0) as group:
        for seed in range(4):
            assert all(count > 0 for count in group.run(compare_with_the_cpu, seed))


SETTINGS = {
    "plain": {},
    "accumulated": {"backward_passes_per_step": 2},
    "predivided": {"gradient_predivide_factor": 2.0},
    "grouped": {"num_groups": 2},
}


@pytest.mark.parametrize("way", ["nccl", "staged"])
def test_a_network_trains_on_devices_as_on_cpus(way):
    with RankGroup(2, imports=("sparkhvd.torch",), gpu_operations=way, collective_timeout=60.0) as group:
        for name, settings in SETTINGS.items():
            expected = group.run(train, False, settings)
            found = group.run(train, True, settings)
            for part, values in expected[0].items():
                np.testing.assert_array_equal(found[0][part], found[1][part], err_msg=f"{name}: {part} of two ranks")
                np.testing.assert_allclose(found[0][part], values, rtol=2e-3, atol=2e-4, err_msg=f"{name}: {part}")


@pytest.mark.parametrize("way", ["nccl", "staged"])
def test_sparse_gradients_on_devices_equal_those_on_cpus(way):
    with RankGroup(2, imports=("sparkhvd.torch",), gpu_operations=way, collective_timeout=60.0) as group:
        expected, found = group.run(train_embeddings, False), group.run(train_embeddings, True)
        for one in (*expected, *found):
            np.testing.assert_allclose(one, expected[0], rtol=1e-5, atol=1e-6)


def test_many_operations_in_any_order_see_their_own_streams():
    with RankGroup(2, imports=("sparkhvd.torch",), gpu_operations="nccl", collective_timeout=60.0) as group:
        for seed in range(3):
            assert group.run(reduce_many_at_once, seed) == [[], []]


def test_a_result_that_does_not_fit_is_an_error_on_all_ranks():
    with RankGroup(2, imports=("sparkhvd.torch",), gpu_operations="nccl", collective_timeout=60.0) as group:
        messages = group.run(gather_more_than_fits)
        assert any("cannot allocate" in message for message in messages), messages
        assert "no error" not in messages, messages


def test_a_collective_within_a_cuda_graph_is_refused():
    with RankGroup(1, imports=("sparkhvd.torch",), gpu_operations="nccl", collective_timeout=60.0) as group:
        assert "captur" in group.run(capture_a_collective)[0]


@pytest.mark.parametrize("way", ["nccl", "staged"])
def test_mixed_precision_trains_equal_weights(way):
    with RankGroup(2, imports=("sparkhvd.torch",), gpu_operations=way, collective_timeout=60.0) as group:
        (losses, weights), (_, others) = group.run(train_in_mixed_precision)
        np.testing.assert_array_equal(weights, others)
        assert losses[-1] < losses[0] / 4


def test_arrays_of_other_libraries_are_read_from_the_device():
    with RankGroup(2, imports=("sparkhvd.torch",)) as group:
        for totals in group.run(sum_arrays_of_other_libraries):
            assert all(total == [3.0] * 3 for total in totals.values()), totals


def test_the_memory_of_a_device_does_not_grow():
    with RankGroup(2, imports=("sparkhvd.torch",), gpu_operations="nccl", collective_timeout=60.0) as group:
        assert max(group.run(gather_often)) <= 64 << 20


def test_a_killed_rank_fails_the_others_soon():
    with RankGroup(3, imports=("sparkhvd.torch",), gpu_operations="nccl", collective_timeout=60.0) as group:
        killer = threading.Timer(15.0, group.kill, [2])
        killer.start()
        outcomes = group.outcomes(reduce_until_an_error)
        killer.join()
        assert outcomes[2].died
        for outcome in outcomes[:2]:
            message, seconds = outcome.value
            assert "rank 2" in message
            assert seconds < 40


def test_a_late_rank_is_a_timeout():
    with RankGroup(2, imports=("sparkhvd.torch",), gpu_operations="nccl", collective_timeout=4.0) as group:
        messages = group.run(reduce_once_and_wait, 1)
        assert "second" in messages[0]
