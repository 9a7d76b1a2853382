"""Measure the images per second of a ResNet-18 on synthetic data, which needs no input pipeline.

Compare several ranks with one rank to see the cost of exchanging gradients. Compare your own training with this one to
see whether its input is slow.

python examples/synthetic_benchmark.py --num-proc 2
mpirun -np 2 python examples/synthetic_benchmark.py --launcher none
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch

import sparkhvd
import sparkhvd.torch as hvd


@dataclass(frozen=True)
class Options:
    """The settings of a rank."""

    batch_size: int
    image_size: int
    width: int
    num_classes: int
    warmup_batches: int
    batches: int
    iterations: int
    fp16_allreduce: bool
    threads: int
    cuda: bool


class Block(torch.nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.convolutions = torch.nn.Sequential(
            torch.nn.Conv2d(before, after, 3, stride, 1, bias=False),
            torch.nn.BatchNorm2d(after),
            torch.nn.ReLU(),
            torch.nn.Conv2d(after, after, 3, 1, 1, bias=False),
            torch.nn.BatchNorm2d(after),
        )
        same = before == after and stride == 1
        self.shortcut = torch.nn.Identity() if same else torch.nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.convolutions(x) + self.shortcut(x))


def resnet18(width: int, classes: int) -> torch.nn.Module:
    """Return a ResNet-18 (He and others, 2015) with ``width`` channels in its first layer; the original has 64."""
    layers = [torch.nn.Conv2d(3, width, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(width), torch.nn.ReLU()]
    layers.append(torch.nn.MaxPool2d(3, 2, 1))
    before = width
    for level in range(4):
        after = width * 2**level
        layers += [Block(before, after, 1 if level == 0 else 2), Block(after, after, 1)]
        before = after
    return torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(before, classes)
    )


def images_per_second(options: Options) -> list[float]:
    """Return the speed of this rank in each iteration; runs on every rank."""
    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    device = torch.device("cuda", hvd.local_rank()) if options.cuda else torch.device("cpu")
    model = resnet18(options.width, options.num_classes).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    images = torch.randn(options.batch_size, 3, options.image_size, options.image_size, device=device)
    labels = torch.randint(options.num_classes, (options.batch_size,), device=device)

    def train(batches: int) -> float:
        start = time.perf_counter()
        for _ in range(batches):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if options.cuda:
            torch.cuda.synchronize()
        return options.batch_size * batches / (time.perf_counter() - start)

    train(options.warmup_batches)
    return [train(options.batches) for _ in range(options.iterations)]


def report(speeds: list[list[float]]) -> str:
    """Return the median and the standard deviation over the iterations, per rank and in total."""
    lines = []
    for rank, iterations in enumerate(speeds):
        lines.append(f"rank {rank}: {_format(iterations)} images/s")
    lines.append(
        f"total of {len(speeds)} ranks: {_format([sum(speed) for speed in zip(*speeds, strict=True)])} images/s"
    )
    return "\n".join(lines)


def _format(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} +- {statistics.pstdev(values):.1f}"


def main() -> None:
    arguments = _arguments()
    options = Options(
        arguments.batch_size,
        arguments.image_size,
        arguments.width,
        arguments.num_classes,
        arguments.num_warmup_batches,
        arguments.num_batches_per_iter,
        arguments.num_iters,
        arguments.fp16_allreduce,
        arguments.threads,
        arguments.cuda,
    )
    if arguments.launcher == "none":  # this process is already a rank, or the only one
        speeds = hvd.allgather_object(images_per_second(options))
        if hvd.rank() == 0:
            print(report(speeds))
        hvd.shutdown()
    elif arguments.launcher == "local":
        print(report(sparkhvd.run(images_per_second, args=(options,), num_proc=arguments.num_proc, launcher="local")))
    else:
        print(report(_on_spark(options, arguments.num_proc)))


def _on_spark(options: Options, num_proc: int) -> list[list[float]]:
    from pyspark.sql import SparkSession  # (the other launchers do not need it)

    spark = SparkSession.builder.master(f"local[{num_proc}]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        return sparkhvd.run(images_per_second, args=(options,), num_proc=num_proc)
    finally:
        spark.stop()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks")
    parser.add_argument(
        "--launcher", choices=["local", "spark", "none"], default="local", help="how to start the ranks"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--image-size", type=int, default=64, help="height and width of an image")
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer")
    parser.add_argument("--num-classes", type=int, default=1000)
    parser.add_argument("--num-warmup-batches", type=int, default=3, help="batches before the timed ones")
    parser.add_argument("--num-batches-per-iter", type=int, default=5, help="batches per timed iteration")
    parser.add_argument("--num-iters", type=int, default=5, help="number of timed iterations")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on each rank")
    parser.add_argument("--cuda", action="store_true", help="train on the GPU with the index of the local rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
