"""Measure the gain of autotuning: a tuned and an untuned communicator take turns with the same steps in one process.

There are three kinds of steps: 1,000 tensors of 4 KiB, submitted asynchronously; the exchange of the gradients of an
MLP with 2.4 million parameters, without their computation; and the whole training step of this MLP, which exchanges
gradients during the backward pass. The tuned communicator first runs alone until it has made its choice. A figure is
the median of the slowest rank.

    python -m bench.autotune [--ranks 2] [--seconds 10]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

import sparkhvd
from bench import machine
from bench.training_step import mlp
from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.communicator import Communicator

Step = Callable[[], None]
SHAPES = [tuple(parameter.shape) for parameter in mlp().parameters()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of measurement per row, after tuning")
    arguments = parser.parse_args()
    print(machine.describe())
    rows = sparkhvd.run(measure, args=(arguments.seconds,), num_proc=arguments.ranks, launcher="local", verbose=0)[0]
    print(f"\n{arguments.ranks} processes{'untuned':>14}{'tuned':>10}   speed   choice")
    for name, untuned, tuned, choice in rows:
        print(f"{name:<12}{untuned * 1e3:>10.2f} ms{tuned * 1e3:>7.2f} ms{untuned / tuned:>7.2f}x  {choice}")
    print(f"\nafterwards: {machine.load()}")


def measure(seconds: float) -> list[tuple[str, float, float, dict[str, int]]]:
    """Measure all kinds of steps on one rank."""
    torch.set_num_threads(1)
    return [
        _row("1000 x 4 KiB", lambda communicator: _exchange(communicator, [(1024,)] * 1000), seconds),
        _row("gradients", lambda communicator: _exchange(communicator, SHAPES[::-1]), seconds),
        _row("MLP step", _training, seconds),
    ]


def _row(name: str, make: Callable[[Communicator], Step], seconds: float) -> tuple[str, float, float, dict[str, int]]:
    context = session.launch_context()
    tuned_context = replace(context, config=replace(context.config, autotune=True))
    with (
        Communicator(context, scope=f"{name} untuned") as untuned,
        Communicator(tuned_context, scope=f"{name} tuned") as tuned,
    ):
        steps = [make(untuned), make(tuned)]
        while tuned.tuning()["searching"]:
            steps[1]()
        times, end = [], time.perf_counter() + seconds
        while untuned.allreduce(np.array(time.perf_counter() < end), ReduceOp.MAX, name="more"):
            times.append([_timed(step, untuned) for step in steps])
        slowest = untuned.allreduce(np.array(times), ReduceOp.MAX)
        return name, statistics.median(slowest[:, 0]), statistics.median(slowest[:, 1]), tuned.tuning()


def _timed(step: Step, communicator: Communicator) -> float:
    communicator.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _exchange(communicator: Communicator, shapes: list[tuple[int, ...]]) -> Step:
    arrays = [np.zeros(shape, np.float32) for shape in shapes]

    def step() -> None:
        for handle in [communicator.allreduce_async(array, name=f"{i}", out=array) for i, array in enumerate(arrays)]:
            handle.wait()

    return step


def _training(communicator: Communicator) -> Step:
    network, inputs, labels = mlp(), torch.randn(64, 784), torch.randint(10, (64,))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    handles = []

    def exchange(name: str, gradient: np.ndarray) -> None:
        handles.append(communicator.allreduce_async(gradient, name=name, out=gradient))

    for name, parameter in network.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: exchange(name, p.grad.numpy()))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(inputs), labels).backward()
        while handles:
            handles.pop().wait()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
