"""Compare a search of 16 trials with 16 separate fits of the same parameters.

    python -m bench.search --rounds 2

Every trial has two ranks, and Spark has four slots. Every separate fit prepares its rows anew. The sides take turns, so
that a busy machine slows all of them down. Compare the ratios rather than the times. A search that leaves more in its
Store than the run of its best trial ends the measurement with an error.

The fits and the searches run in one process. Ranks of the separate fits import PyTorch, as they do by default; a
further row shows fits with ``SPARKHVD_WARM_SECONDS``, which do not. ``--programs`` also runs every fit as a program of
its own, like a loop in a shell, which starts Spark for every fit.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import optuna
import torch
from pyspark.sql import DataFrame

from bench import machine
from bench.estimators import BATCH, COLUMNS, RANKS, make_rows, network, start_spark
from sparkhvd import Store, TorchEstimator, tune

_TRIALS = 16
_EPOCHS = 4
_SEPARATE = "16 separate fits"
_SEARCHES = ("search, two trials at a time", "search, two trials at a time, halving")
_RATES = [float(rate) for rate in np.logspace(-4, -1, _TRIALS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--programs", action="store_true", help="also run every fit as a program of its own")
    parser.add_argument("--program", type=float, help="fit once with this rate, and end")
    options = parser.parse_args()
    if options.program is not None:
        _fit_once(options.program, options.rows)
        return
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(machine.describe())
    print(f"{_TRIALS} trials of {RANKS} ranks on 4 slots, {options.rows:,} rows, {_EPOCHS} epochs", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-search-") as folder:
        spark = start_spark(Path(folder), slots=4)
        try:
            rows = make_rows(spark, options.rows)
            seconds = _measured(rows, Path(folder), options)
        finally:
            spark.stop()
    for search in _SEARCHES:
        for separate in (name for name in seconds if name not in _SEARCHES):
            target = "   (target: at most 0.6)" if separate == _SEPARATE else ""
            print(f"  {search:<40} / {separate:<28} {seconds[search] / seconds[separate]:8.3f}{target}")


def _measured(rows: DataFrame, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    halving = tune.SuccessiveHalving(min_epochs=1, factor=4)
    search, search_by_halving = _SEARCHES
    sides: dict[str, Callable[[Store], object]] = {
        _SEPARATE: lambda store: _fit_all(rows, store),
        "16 separate fits, warm starts": lambda store: _fit_all(rows, store, SPARKHVD_WARM_SECONDS="60"),
        search: lambda store: _search(rows, store, None),
        search_by_halving: lambda store: _search(rows, store, halving),
    }
    if options.programs:
        sides["16 separate programs"] = lambda _: _run_programs(options.rows)
    spent: dict[str, list[float]] = {name: [] for name in sides}
    _estimator(Store.create(str(folder / "first")), **_space(_RATES[0])).fit(rows)  # which starts Spark's workers
    for number in range(options.rounds):
        for name, run in sides.items():
            store = Store.create(str(folder / f"{name} {number}"))
            start = time.perf_counter()
            run(store)
            spent[name].append(time.perf_counter() - start)
            print(f"  {name:<44} {spent[name][-1]:8.1f} s", flush=True)
    return {name: statistics.median(values) for name, values in spent.items()}


def _fit_all(rows: DataFrame, store: Store, **variables: str) -> None:
    for rate in _RATES:
        _estimator(store, **_space(rate), backend_env=variables).fit(rows)


def _run_programs(rows: int) -> None:
    for rate in _RATES:
        words = [sys.executable, "-m", "bench.search", "--rows", str(rows), "--program", str(rate)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _fit_once(rate: float, count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-search-") as folder:
        spark = start_spark(Path(folder), slots=4)
        try:
            _estimator(Store.create(f"{folder}/store"), **_space(rate)).fit(make_rows(spark, count))
        finally:
            spark.stop()


def _search(rows: DataFrame, store: Store, halving: tune.SuccessiveHalving | None) -> None:
    result = tune.minimize(
        _estimator(store),
        rows,
        lambda trial: _space(trial.suggest_categorical("rate", _RATES)),
        _TRIALS,
        metric="loss",
        parallelism=2,
        sampler=optuna.samplers.GridSampler({"rate": _RATES}, seed=1),
        pruner=optuna.pruners.NopPruner(),
        halving=halving,
    )
    left = {path.split("/")[1] for path in store.list("")}
    if left != {result.best_model.getRunId()}:
        raise SystemExit(f"The search left {sorted(left)} in its Store, which is more than its best trial's run.")


def _space(rate: float) -> dict[str, object]:
    model = network()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=rate)}


def _estimator(store: Store, **more: object) -> TorchEstimator:
    return TorchEstimator(
        num_proc=RANKS,
        store=store,
        keep_data=0.0,
        loss=torch.nn.functional.mse_loss,
        feature_cols=COLUMNS,
        label_cols=["y"],
        batch_size=BATCH,
        epochs=_EPOCHS,
        random_seed=1,
        verbose=0,
        **more,
    )


if __name__ == "__main__":
    main()
