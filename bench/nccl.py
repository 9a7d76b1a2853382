"""Compare allreduce of CUDA tensors between the GPUs of this machine: sparkhvd's NCCL, staged, torch.distributed.

Each way has its own processes, one per GPU; a time is the median of the slowest rank. With one GPU, the table shows the
cost of a call. Ranks that outnumber the GPUs share them, and NCCL then connects them through sockets, which measures
little but the cost of a call.

    python -m bench.nccl [--ranks 2] [--seconds 2]
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import sparkhvd
import sparkhvd.torch as hvd
from bench import machine

MIB = 1 << 20
SIZES = (4096, MIB // 4, MIB, 16 * MIB, 128 * MIB)
WAYS = ("nccl", "staged", "torch.distributed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes; by default one per GPU")
    parser.add_argument("--seconds", type=float, default=2.0, help="per size and way")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.nccl measures GPUs, and torch sees none here.")
    count = torch.cuda.device_count()
    ranks = arguments.ranks or count
    times = {way: measured(way, ranks, arguments.seconds) for way in WAYS}
    print(f"{machine.describe()}; torch {torch.__version__}; {count} x {torch.cuda.get_device_name()}; {ranks} ranks")
    print(f"{'bytes':>12}" + "".join(f"{way:>20}" for way in WAYS) + "  microseconds")
    for index, size in enumerate(SIZES):
        print(f"{size:>12}" + "".join(f"{times[way][index] * 1e6:>20.1f}" for way in WAYS))


def measured(way: str, ranks: int, seconds: float) -> list[float]:
    """Return the seconds of an allreduce of every size."""
    ours = way != "torch.distributed"
    env = {"SPARKHVD_GPU_OPERATIONS": way if ours else "staged"}
    arguments = (ours, seconds, _free_port())
    by_rank = sparkhvd.run(_rank, args=arguments, num_proc=ranks, launcher="local", env=env, verbose=0)
    return [max(each) for each in zip(*by_rank, strict=True)]


def _rank(ours: bool, seconds: float, port: int) -> list[float]:
    hvd.init()
    if torch.cuda.device_count() < hvd.local_size():
        os.environ["NCCL_HOSTID"] = f"host of rank {hvd.rank()}"  # NCCL refuses two ranks of a host on one device
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    if not ours:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("nccl", rank=hvd.rank(), world_size=hvd.size())
    times = []
    for size in SIZES:
        data = torch.ones(size // 4, device="cuda")
        times.append(_median(lambda data=data: _reduce(data, ours), seconds))
    if not ours:
        dist.destroy_process_group()
    return times


def _reduce(data: torch.Tensor, ours: bool) -> None:
    if ours:
        hvd.allreduce_(data, op=hvd.Average)
    else:
        dist.all_reduce(data, op=dist.ReduceOp.AVG)
    torch.cuda.synchronize()


def _median(act: Callable[[], None], seconds: float) -> float:
    """Return the median of as many calls as all ranks agree to make."""
    act()
    began = time.perf_counter()
    act()
    once = torch.tensor([time.perf_counter() - began])
    calls = max(5, min(1000, int(seconds / hvd.allreduce(once, op=hvd.Max).item())))
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
