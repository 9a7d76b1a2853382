"""Search for a network with DeepHyper. Every evaluation trains on two ranks of this machine.

    pip install deephyper
    python examples/deephyper_digits.py --evaluations 8

The data are scikit-learn's scans of handwritten digits. Threads of this process evaluate several points at a time. Each
of them starts ranks of its own, so that a rank that fails ends only its evaluation.
"""

from __future__ import annotations

import argparse
import math

import pandas as pd
import torch
from deephyper.evaluator import Evaluator, RunningJob
from deephyper.hpo import CBO, HpProblem
from sklearn.datasets import load_digits

import sparkhvd
from sparkhvd.errors import SparkHvdError

RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluations", type=int, default=8, help="points to evaluate (default: %(default)s)")
    parser.add_argument("--parallelism", type=int, default=1, help="evaluations at a time (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the rows (default: %(default)s)")
    parser.add_argument("--folder", default="deephyper", help="where results are written (default: %(default)s)")
    options = parser.parse_args()

    problem = HpProblem()
    problem.add_hyperparameter((1e-4, 1e-1, "log-uniform"), "rate", default_value=1e-2)
    problem.add_hyperparameter((8, 64), "width", default_value=32)
    problem.add_hyperparameter([16, 32], "batch_size", default_value=32)
    evaluator = Evaluator.create(
        evaluate,
        method="thread",  # the ranks are processes, so that a thread only waits for them
        method_kwargs={"num_workers": options.parallelism, "run_function_kwargs": {"epochs": options.epochs}},
    )
    results = CBO(problem, random_state=1, log_dir=options.folder).search(evaluator, max_evals=options.evaluations)

    losses = -pd.to_numeric(results["objective"], errors="coerce").dropna()  # failed evaluations have names instead
    print(f"{len(results)} evaluations, {len(results) - len(losses)} of them failed")
    if losses.empty:
        return
    best = results.loc[losses.idxmin()]
    names = [name for name in results.columns if name.startswith("p:")]
    print("best:", ", ".join(f"{name[2:]}={best[name]:.3g}" for name in names))
    print(f"held-out loss, {RANKS} ranks: {losses.min():.3f}")
    print(f"held-out accuracy, {RANKS} ranks: {best['m:accuracy']:.1%}")


def evaluate(job: RunningJob, epochs: int) -> dict[str, object] | str:
    """Return the negative loss of one point, because DeepHyper maximizes, or the reason of a failure."""
    try:
        ranks = sparkhvd.run(train, (dict(job.parameters), epochs), num_proc=RANKS, launcher="local")
    except SparkHvdError as error:
        print(f"An evaluation failed: {error}", flush=True)
        return f"F_{type(error).__name__}"  # DeepHyper's mark of a point that failed
    loss, accuracy = ranks[0]
    if not math.isfinite(loss):
        return "F_loss_not_finite"
    return {"objective": -loss, "metadata": {"accuracy": accuracy}}


def train(point: dict[str, float], epochs: int) -> tuple[float, float]:
    """Train on the rows of this rank; return the loss and the accuracy of the held-out rows."""
    import sparkhvd.torch as hvd

    hvd.init()
    pixels, digit = load_digits(return_X_y=True)
    pixels, digit = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digit)
    held_out = pixels[1500:], digit[1500:]
    torch.manual_seed(1)
    width = int(point["width"])
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=point["rate"]))
    for epoch in range(epochs):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))
        for step in order.split(int(point["batch_size"]) * hvd.size())[:-1]:  # skips the last batch, which is smaller
            rows = step[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(pixels[rows]), digit[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        scores = model(held_out[0])
    loss = torch.nn.functional.cross_entropy(scores, held_out[1])
    return float(loss), float((scores.argmax(dim=1) == held_out[1]).float().mean())


if __name__ == "__main__":
    main()
