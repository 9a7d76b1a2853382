"""float32 allreduce between processes of this machine: our engine beside torch.distributed's Gloo.

Both libraries run in the same processes, in turns, on the same memory; a row is the median of the repetitions, of the
slowest rank. Results are checked before anything is timed.

    python -m bench.collectives [--ranks 2 4] [--seconds 2.0]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import secrets
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

import sparkhvd.torch as hvd
from sparkhvd.comm import session
from sparkhvd.comm.launch_context import LaunchContext
from sparkhvd.comm.rendezvous import RendezvousServer
from sparkhvd.config import Config
from sparkhvd.world import layout

SIZES = tuple(4096 * 4**step for step in range(8))  # 4 KiB to 64 MiB
MANY = 1000


@dataclass(frozen=True)
class Row:
    """The medians of one line of the table, in seconds."""

    what: str
    size: int
    ours: float
    gloo: float
    repetitions: int


def main() -> None:
    arguments = _arguments()
    print(_machine())
    for ranks in arguments.ranks:
        _print_table(ranks, _run(ranks, arguments.seconds))


def _run(ranks: int, seconds: float) -> list[Row]:
    """Start the ranks as processes and take the rows from rank 0."""
    token = secrets.token_bytes(16)
    context = multiprocessing.get_context("spawn")
    with RendezvousServer(token) as server:
        receiver, sender = context.Pipe(duplex=False)
        gloo_port = _free_port()
        processes = [
            context.Process(
                target=_rank,
                args=(
                    LaunchContext(world, (("127.0.0.1", server.port),), token, "here", config=Config()),
                    gloo_port,
                    seconds,
                    sender,
                ),
            )
            for world in layout(["here"] * ranks)
        ]
        for process in processes:
            process.start()
        sender.close()
        rows = receiver.recv()
        for process in processes:
            process.join(60)
    return rows


def _rank(context: LaunchContext, gloo_port: int, seconds: float, sender) -> None:
    torch.set_num_threads(1)
    session.offer(context)
    hvd.init()
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{gloo_port}", rank=context.world.rank, world_size=context.world.size
    )
    rows = [_one_tensor(size, seconds) for size in SIZES]
    rows.append(_many_tensors(seconds))
    if context.world.rank == 0:
        sender.send(rows)
    hvd.barrier()
    dist.destroy_process_group()
    hvd.shutdown()


def _one_tensor(size: int, seconds: float) -> Row:
    tensor = torch.zeros(size // 4)

    def ours() -> None:
        hvd.allreduce_(tensor, name=f"bench.{size}", op=hvd.Sum)

    def gloo() -> None:
        dist.all_reduce(tensor)

    for operation in (ours, gloo):
        _check(operation, [tensor])
    return Row("one tensor", size, *_medians(ours, gloo, seconds, [tensor]))


def _many_tensors(seconds: float) -> Row:
    tensors = [torch.zeros(1024) for _ in range(MANY)]
    names = [f"bench.many.{index}" for index in range(MANY)]

    def ours() -> None:
        handles = [hvd.allreduce_async_(t, name=n, op=hvd.Sum) for t, n in zip(tensors, names, strict=True)]
        for handle in handles:
            handle.wait()

    def gloo() -> None:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()

    for operation in (ours, gloo):
        _check(operation, tensors)
    return Row(f"{MANY} tensors, async", 4096, *_medians(ours, gloo, seconds, tensors))


def _check(operation: Callable[[], None], tensors: list[torch.Tensor]) -> None:
    """Whole numbers, whose sum is exact, different in every element."""
    ranks = hvd.size()
    for number, tensor in enumerate(tensors):
        tensor.copy_((torch.arange(len(tensor)) + number) % 1009 * (hvd.rank() + 1))
    operation()
    for number, tensor in enumerate(tensors):
        want = ((torch.arange(len(tensor)) + number) % 1009 * (ranks * (ranks + 1) // 2)).float()
        if not torch.equal(tensor, want):
            raise SystemExit(f"wrong result of {operation.__qualname__} on rank {hvd.rank()}")


def _medians(
    ours: Callable[[], None], gloo: Callable[[], None], seconds: float, tensors: list[torch.Tensor]
) -> tuple[float, float, int]:
    """Medians over interleaved repetitions of the time of the slowest rank, and how many repetitions there were."""
    for tensor in tensors:
        tensor.zero_()  # sums of zeros stay finite
    for _ in range(3):
        ours()
        gloo()
    once = _timed(ours) + _timed(gloo)
    repetitions = int(hvd.broadcast(torch.tensor(int(min(1000, max(11, seconds / once)))), 0).item())
    times = np.array([(_timed(ours), _timed(gloo)) for _ in range(repetitions)])
    slowest = session.current().allreduce(times, hvd.Max)
    return statistics.median(slowest[:, 0]), statistics.median(slowest[:, 1]), repetitions


def _timed(operation: Callable[[], None]) -> float:
    hvd.barrier()
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


def _print_table(ranks: int, rows: list[Row]) -> None:
    print(f"\nfloat32 allreduce, sum, in place, {ranks} processes\n")
    print(
        f"{'what':22} {'bytes each':>10} {'sparkhvd us':>12} {'Gloo us':>12} {'Gloo/ours':>9} {'ours GB/s':>9} {'n':>5}"
    )
    for row in rows:
        rate = row.size * (MANY if row.what.startswith(str(MANY)) else 1) / row.ours / 1e9
        print(
            f"{row.what:22} {row.size:>10} {row.ours * 1e6:>12.1f} {row.gloo * 1e6:>12.1f} "
            f"{row.gloo / row.ours:>9.2f} {rate:>9.2f} {row.repetitions:>5}"
        )


def _machine() -> str:
    model = next(
        (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),  # noqa: PTH123, SIM115
        platform.machine(),
    )
    return (
        f"{model}, {os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}; "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="how many processes; one table for each")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long to measure for a row")
    return parser.parse_args()


if __name__ == "__main__":
    main()
