"""Compare Adasum with Average by the steps to a given accuracy, on scans of handwritten digits.

The learning rate is not scaled by the number of ranks. Averaging over more ranks makes a step less noisy, but not
longer. Adasum makes a step longer the more the ranks' steps differ. Every rank draws its own rows, and a third of the
scans is held out to measure the accuracy. The program prints medians over the seeds and draws a plot.

    python -m bench.adasum [--ranks 4] [--seeds 5] [--write bench/results/adasum]
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

import sparkhvd
import sparkhvd.torch as hvd

TARGET = 0.95
EVERY = 5  # steps between two measurements of the accuracy
OPS = {"Average": hvd.Average, "Adasum": hvd.Adasum}


@dataclass(frozen=True)
class Problem:
    """The settings of one training run."""

    rate: float
    momentum: float
    rows: int
    steps: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--write", type=Path, help="path of the table (.txt) and the plot (.png), without the suffix")
    arguments = parser.parse_args()
    problem = Problem(rate=0.05, momentum=0.9, rows=16, steps=arguments.steps)
    curves: dict[str, list[list[float]]] = {}
    for ranks in (1, arguments.ranks):
        by_rank = sparkhvd.run(accuracies, args=(problem, arguments.seeds), num_proc=ranks, launcher="local", verbose=0)
        by_op = by_rank[0]
        curves |= {f"{op}, {ranks} ranks": runs for op, runs in by_op.items() if ranks > 1} or {
            "one rank": by_op["Average"]
        }
    table = _table(curves, problem)
    print(table)
    if arguments.write:
        arguments.write.with_suffix(".txt").write_text(table + "\n")
        _plot(curves, problem, arguments.write.with_suffix(".png"))


def accuracies(problem: Problem, seeds: int) -> dict[str, list[list[float]]]:
    """Run on every rank; return the accuracy after every few steps for each reduction and each seed."""
    hvd.init()
    torch.set_num_threads(1)
    return {name: [_train(problem, op, seed) for seed in range(seeds)] for name, op in OPS.items()}


def _train(problem: Problem, op: hvd.ReduceOp, seed: int) -> list[float]:
    features, labels = _digits(seed)
    held_out = len(features) // 3
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    plain = torch.optim.SGD(model.parameters(), lr=problem.rate, momentum=problem.momentum)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=op)
    curve = []
    for step in range(1, problem.steps + 1):
        torch.manual_seed(1_000_003 * seed + 1009 * step + hvd.rank())
        mine = torch.randint(held_out, len(features), (problem.rows,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(features[mine]), labels[mine]).backward()
        optimizer.step()
        if step % EVERY == 0:
            with torch.no_grad():
                right = model(features[:held_out]).argmax(1) == labels[:held_out]
            curve.append(right.double().mean().item())
    return curve


def _digits(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits  # noqa: PLC0415  (the driver does not need it)

    digits = load_digits()
    torch.manual_seed(seed)
    order = torch.randperm(len(digits.target))
    return torch.tensor(digits.data / 16.0, dtype=torch.float32)[order], torch.tensor(digits.target)[order]


def _steps_to(accuracy: float, curve: list[float]) -> float:
    """Return the first measured step at which the accuracy was reached; infinity if there is none."""
    return next((EVERY * (index + 1) for index, value in enumerate(curve) if value >= accuracy), float("inf"))


def _table(curves: dict[str, list[list[float]]], problem: Problem) -> str:
    lines = []
    lines.append(
        f"digits, {problem.rows} rows per rank and step, learning rate {problem.rate}, momentum {problem.momentum}; "
        f"medians of {len(next(iter(curves.values())))} seeds"
    )
    for name, runs in curves.items():
        steps = [_steps_to(TARGET, run) for run in runs]
        best = statistics.median(max(run) for run in runs)
        lines.append(
            f"{name:<18} {statistics.median(steps):>6g} steps to {TARGET:.0%} (seeds: {sorted(steps)}); best {best:.1%}"
        )
    return "\n".join(lines)


def _plot(curves: dict[str, list[list[float]]], problem: Problem, path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415  (the ranks do not need it)

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7, 4))
    steps = range(EVERY, problem.steps + 1, EVERY)
    for name, runs in curves.items():
        axes.plot(steps, [statistics.median(values) for values in zip(*runs, strict=True)], label=name)
    axes.axhline(TARGET, color="gray", linewidth=0.8)
    axes.set(xlabel="steps", ylabel="accuracy on held-out scans", ylim=(0.7, 1.0))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
