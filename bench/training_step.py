"""Compare a training step with DistributedOptimizer and with DistributedDataParallel on Gloo, one thread per rank.

Both train copies of the same two networks on the same rows, taking turns in the same processes. The time of a step is
the median of the repetitions on the slowest rank. The efficiency is the time of a step in which all ranks compute at
once and exchange nothing, divided by the time of a step with the exchange. It would be 1 if the exchange cost nothing.
For comparison, ``alone`` is the time of one rank while the others wait.

    python -m bench.training_step [--ranks 2] [--seconds 20] [--write bench/results/training_step.txt]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import sparkhvd
import sparkhvd.torch as hvd
from examples.synthetic_benchmark import torch_network
from tests.ports import free_port

Step = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """The results of one network; times are in seconds."""

    network: str
    parameters: int
    repetitions: int
    ours: float
    compressed: float
    gloo: float
    computation: float
    alone: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of measurement per network")
    parser.add_argument("--write", type=Path, help="file that also receives the table")
    arguments = parser.parse_args()
    results = sparkhvd.run(
        measure, args=(arguments.seconds, free_port()), num_proc=arguments.ranks, launcher="local", verbose=0
    )
    table = _table(results[0], arguments.ranks)
    print(table)
    if arguments.write:
        arguments.write.write_text(table + "\n")


def measure(seconds: float, gloo_port: int) -> list[Row]:
    """Run on every rank."""
    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{gloo_port}", rank=hvd.rank(), world_size=hvd.size())
    rows = [
        _network("MLP", mlp, torch.randn(64, 784), seconds),
        _network("ResNet-18", lambda: torch_network("resnet18", 64, 10, 64), torch.randn(8, 3, 64, 64), seconds),
    ]
    hvd.barrier()
    dist.destroy_process_group()
    hvd.shutdown()
    return rows


def mlp() -> torch.nn.Module:
    """Return an MLP with 2.4 million parameters."""
    return torch.nn.Sequential(
        torch.nn.Linear(784, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 10),
    )


def _network(name: str, make: Callable[[], torch.nn.Module], inputs: torch.Tensor, seconds: float) -> Row:
    labels = torch.randint(10, (len(inputs),))
    ours, compressed, parallel, plain = (_seeded(make) for _ in range(4))
    gloo = torch.nn.parallel.DistributedDataParallel(parallel, gradient_as_bucket_view=True)
    steps = [
        _step(ours, _distributed(ours, "plain", hvd.Compression.none), inputs, labels),
        _step(compressed, _distributed(compressed, "bf16", hvd.Compression.bf16), inputs, labels),
        _step(gloo, torch.optim.SGD(gloo.parameters(), lr=0.01), inputs, labels),
        _step(plain, torch.optim.SGD(plain.parameters(), lr=0.01), inputs, labels),
    ]
    for _ in range(3):
        for step in steps:
            step()
    _check(ours, parallel, name)
    alone = _alone(steps[-1])
    times = _in_turns(steps, seconds)
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    return Row(name, parameters, len(times), *np.median(times, axis=0).tolist(), alone)


def _seeded(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    torch.manual_seed(0)
    return make()


def _distributed(model: torch.nn.Module, prefix: str, compression: hvd.Compressor) -> torch.optim.Optimizer:
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    return hvd.DistributedOptimizer(plain, model.named_parameters(prefix=prefix), compression=compression)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor) -> Step:
    mine = inputs + 0.1 * hvd.rank()

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(mine), labels).backward()
        optimizer.step()

    return step


def _check(ours: torch.nn.Module, gloo: torch.nn.Module, name: str) -> None:
    for (which, got), want in zip(ours.named_parameters(), gloo.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4, msg=f"{name}: {which} differs from Gloo's")


def _alone(step: Step) -> float:
    """Return on all ranks the median time of a step of rank 0 while the others wait."""
    times = []
    for _ in range(11 if hvd.rank() == 0 else 0):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return hvd.broadcast_object(statistics.median(times) if times else 0.0)


def _in_turns(steps: list[Step], seconds: float) -> np.ndarray:
    """Return the times of the slowest rank, by repetition and kind of step."""
    times: list[list[float]] = []
    more, end = True, time.perf_counter() + seconds
    while more:
        row = []
        for step in steps:
            hvd.barrier()
            start = time.perf_counter()
            step()
            row.append(time.perf_counter() - start)
        times.append(row)
        more = hvd.broadcast_object(time.perf_counter() < end)
    return np.max(hvd.allgather_object(np.array(times)), axis=0)


def _table(rows: list[Row], ranks: int) -> str:
    lines = [
        (
            f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; {ranks} ranks, one thread each; "
            f"milliseconds per step, medians of interleaved repetitions; load of the machine {os.getloadavg()[0]:.1f}"
        ),
        (
            f"{'network':<10} {'parameters':>11} {'ours':>8} {'bf16':>8} {'DDP':>8} {'DDP/ours':>9} {'DDP/bf16':>9} "
            f"{'compute':>8} {'efficiency':>11} {'of DDP':>7} {'alone':>8} {'times':>6}"
        ),
    ]
    lines += [
        f"{row.network:<10} {row.parameters:>11,} {row.ours * 1e3:>8.2f} {row.compressed * 1e3:>8.2f} "
        f"{row.gloo * 1e3:>8.2f} {row.gloo / row.ours:>9.2f} {row.gloo / row.compressed:>9.2f} "
        f"{row.computation * 1e3:>8.2f} {row.computation / row.ours:>11.2f} {row.computation / row.gloo:>7.2f} "
        f"{row.alone * 1e3:>8.2f} {row.repetitions:>6}"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
