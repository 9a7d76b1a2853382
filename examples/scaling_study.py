"""Measure how training scales: run ``synthetic_benchmark.py`` with several numbers of ranks.

Weak scaling keeps the number of images per rank and step, strong scaling the number of images of all ranks together.
The efficiency is the speed per rank, divided by that of the smallest job.

python examples/scaling_study.py --num-proc 1 2 4
python examples/scaling_study.py --num-proc 1 2 4 --total-batch-size 64 --model vgg16
spark-submit examples/scaling_study.py --launcher spark --num-proc 1 2 4
sbatch --nodes=8 --ntasks-per-node=8 --wrap "python examples/scaling_study.py --launcher sparkhvdrun --num-proc 1 8 64"
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from synthetic_benchmark import (
    EXCHANGES,
    Options,
    add_options,
    arguments_of,
    images_per_second,
    options_of,
    report,
    spark_session,
)

import sparkhvd

if TYPE_CHECKING:
    from collections.abc import Iterator

_BENCHMARK = Path(__file__).with_name("synthetic_benchmark.py")
_TOTAL = re.compile(r"Total img/sec on \d+ .PU\(s\): ([\d.]+) \+-([\d.]+)")


@dataclass(frozen=True)
class Result:
    """The speed of one job.

    Attributes:
        exchange: how the ranks exchange gradients, a key of ``EXCHANGES``.
        ranks: the number of ranks.
        speed: images per second of all ranks together.
        spread: half of the 95% interval of ``speed`` over the iterations.
        options: the settings of a rank.
    """

    exchange: str
    ranks: int
    speed: float
    spread: float
    options: Options

    def step_seconds(self) -> float:
        """Return the time of a step, including the exchange of its gradients."""
        return self.ranks * self.options.batch_size * self.options.backward_passes_per_step / self.speed


def measure(
    run: Callable[[Options, int], str], options: Options, exchange: str, ranks: int, total_batch_size: int | None
) -> Result:
    """Run one job.

    Args:
        run: runs ranks with the given settings and returns what the benchmark prints.
        options: the settings of a rank.
        exchange: a key of ``EXCHANGES``.
        ranks: the number of ranks.
        total_batch_size: images per step of all ranks together; None keeps the number per rank.
    """
    options = replace(options, **EXCHANGES[exchange])
    if total_batch_size is not None:
        options = replace(options, batch_size=total_batch_size // ranks)
    output = run(options, ranks)
    total = _TOTAL.search(output)
    if total is None:
        raise RuntimeError(f"The benchmark with {ranks} ranks has no result:\n{output}")
    return Result(exchange, ranks, float(total[1]), float(total[2]), options)


def table(results: Sequence[Result]) -> str:
    """Return a table of the speeds, and of the efficiency compared with the smallest job of the same exchange."""
    lines = [f"{'exchange':10} {'ranks':>6} {'img/sec':>18} {'efficiency':>11} {'step':>10} {'longer by':>10}"]
    for result in results:
        smallest = min((other for other in results if other.exchange == result.exchange), key=lambda job: job.ranks)
        efficiency = result.speed / result.ranks / (smallest.speed / smallest.ranks)
        # What a step takes beyond the computation of its images, at the speed of the smallest job.
        longer = result.step_seconds() * (1 - efficiency)
        lines.append(
            f"{result.exchange:10} {result.ranks:>6} {result.speed:>10.1f} +-{result.spread:<6.1f}"
            f"{efficiency:>11.0%} {result.step_seconds() * 1000:>7.1f} ms {longer * 1000:>7.1f} ms"
        )
    return "\n".join(lines)


@contextmanager
def _runner(launcher: str) -> Iterator[Callable[[Options, int], str]]:
    """Provide a function that runs the benchmark with a launcher."""
    with ExitStack() as stack:
        if launcher == "spark":
            spark = spark_session("local[*]")
            stack.callback(spark.stop)

        def run(options: Options, ranks: int) -> str:
            if launcher == "sparkhvdrun":  # on the hosts of a Slurm or LSF job, or on this machine
                benchmark = [sys.executable, str(_BENCHMARK), "--launcher", "none", *arguments_of(options)]
                command = ["sparkhvdrun", "-np", str(ranks), *benchmark]
                return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            name = "auto" if launcher == "spark" else launcher
            return report(
                options, sparkhvd.run(images_per_second, args=(options,), num_proc=ranks, launcher=name, verbose=0)
            )

        yield run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--launcher", choices=["local", "spark", "sparkhvdrun"], default="local")
    parser.add_argument(
        "--total-batch-size", type=int, help="images per step of all ranks together: measures strong scaling"
    )
    parser.add_argument(
        "--exchange", nargs="+", choices=EXCHANGES, default=["average"], help="how to exchange gradients"
    )
    parser.add_argument("--results", type=Path, help="a file to which the results are appended, as lines of JSON")
    add_options(parser)
    arguments = parser.parse_args()
    options, total = options_of(arguments), arguments.total_batch_size
    for ranks in arguments.num_proc:
        if total is not None and total % ranks:
            parser.error(f"--total-batch-size {total} is not a multiple of {ranks} ranks")
    scaling = f"{total} images per step" if total is not None else f"{options.batch_size} images per rank and step"
    print(f"{options.model} of {options.framework}, {scaling}")
    results: list[Result] = []
    with _runner(arguments.launcher) as run:
        for exchange in arguments.exchange:
            for ranks in sorted(arguments.num_proc):
                result = measure(run, options, exchange, ranks, total)
                results.append(result)
                print(f"{exchange}, {ranks} ranks: {result.speed:.1f} img/sec", flush=True)
                if arguments.results is not None:
                    with arguments.results.open("a") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
    print()
    print(table(results))


if __name__ == "__main__":
    main()
