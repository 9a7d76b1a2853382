"""Compare allreduces of CUDA tensors on this machine: sparkhvd with NCCL, sparkhvd staged, and torch.distributed.

Each contender has its own processes, one per GPU. A time is the median of the slowest rank. With one GPU, the table
shows only the cost of a call. If there are more ranks than GPUs, the ranks share GPUs and NCCL connects them through
sockets, so the times do not show the speed of several GPUs.

    python -m bench.nccl [--ranks 2] [--seconds 2]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import sparkhvd
import sparkhvd.torch as hvd
from bench import machine
from tests.ports import free_port

MIB = 1 << 20
SIZES = (4096, MIB // 4, MIB, 16 * MIB, 128 * MIB)
CONTENDERS = ("nccl", "staged", "torch.distributed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="number of processes (default: one per GPU)")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of measurement per size and contender")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.nccl needs a GPU, and torch sees none on this machine.")
    count = torch.cuda.device_count()
    ranks = arguments.ranks or count
    times = {contender: measure(contender, ranks, arguments.seconds) for contender in CONTENDERS}
    print(f"{machine.describe()}; torch {torch.__version__}; {count} x {torch.cuda.get_device_name()}; {ranks} ranks")
    print(f"{'bytes':>12}" + "".join(f"{contender:>20}" for contender in CONTENDERS) + "  microseconds")
    for index, size in enumerate(SIZES):
        print(f"{size:>12}" + "".join(f"{times[contender][index] * 1e6:>20.1f}" for contender in CONTENDERS))


def measure(contender: str, ranks: int, seconds: float) -> list[float]:
    """Return the seconds of an allreduce for each size."""
    uses_sparkhvd = contender != "torch.distributed"
    env = {"SPARKHVD_GPU_OPERATIONS": contender if uses_sparkhvd else "staged"}
    arguments = (uses_sparkhvd, seconds, free_port())
    by_rank = sparkhvd.run(_times_of_rank, args=arguments, num_proc=ranks, launcher="local", env=env, verbose=0)
    return [max(times) for times in zip(*by_rank, strict=True)]


def _times_of_rank(uses_sparkhvd: bool, seconds: float, port: int) -> list[float]:
    hvd.init()
    if torch.cuda.device_count() < hvd.local_size():
        # NCCL refuses two ranks of one host on the same device.
        os.environ["NCCL_HOSTID"] = f"host of rank {hvd.rank()}"
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    if not uses_sparkhvd:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("nccl", rank=hvd.rank(), world_size=hvd.size())
    times = []
    for size in SIZES:
        data = torch.ones(size // 4, device="cuda")
        times.append(_median(lambda data=data: _allreduce(data, uses_sparkhvd), seconds))
    if not uses_sparkhvd:
        dist.destroy_process_group()
    return times


def _allreduce(data: torch.Tensor, uses_sparkhvd: bool) -> None:
    if uses_sparkhvd:
        hvd.allreduce_(data, op=hvd.Average)
    else:
        dist.all_reduce(data, op=dist.ReduceOp.AVG)
    torch.cuda.synchronize()


def _median(call: Callable[[], None], seconds: float) -> float:
    """Return the median seconds of a call; all ranks make the same number of calls."""
    call()
    start = time.perf_counter()
    call()
    duration = torch.tensor([time.perf_counter() - start])
    calls = max(5, min(1000, int(seconds / hvd.allreduce(duration, op=hvd.Max).item())))
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
