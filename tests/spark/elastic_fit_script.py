"""Run by test_elastic_fits.py in a separate process: dynamic allocation is set before Spark starts.

python elastic_fit_script.py FOLDER {torch|lightning|keras} {killed|decommissioned}...
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil
from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd import SparkBackend, Store
from sparkhvd.comm import session
from tests.scripts import print_results
from tests.spark.elastic_script import SETTINGS, SIGNALS
from tests.spark.test_elastic_fits import CHANGES, EPOCHS, ESTIMATORS, ROWS, uses
from tests.waiting import wait_for

_SECONDS = 200.0


class Turns:
    """Waits in each generation of one rank until another can join, and in each of two until the second has left.

    Args:
        folder: receives a file per rank and generation of two ranks, with the process of the rank.
        losses: the number of generations of two ranks whose second rank must leave.
    """

    def __init__(self, folder: Path, losses: int) -> None:
        self.folder, self.losses = folder, losses

    def __call__(self, epoch: int, step: int) -> None:
        membership, rank = session.membership(), session.rank()
        if session.size() == 2:
            (self.folder / f"pair-{rank}-{membership.generation:03d}").write_text(str(os.getpid()))
        if rank == 0 and (session.size() == 1 or len(list(self.folder.glob("pair-0-*"))) <= self.losses):
            wait_for(membership.is_notified, _SECONDS)


def end_executors(folder: Path, ends: Sequence[str]) -> None:
    """End the executors of the first second ranks."""
    for number, end in enumerate(ends):
        wait_for(lambda number=number: len(list(folder.glob("pair-1-*"))) > number, _SECONDS)
        path = sorted(folder.glob("pair-1-*"))[number]
        wait_for(lambda path=path: bool(path.read_text()))
        parents = psutil.Process(int(path.read_text())).parents()
        executor = next(one for one in parents if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline()))
        os.kill(executor.pid, SIGNALS[end])


def main(folder: Path, framework: str, ends: Sequence[str]) -> None:
    builder = SparkSession.builder.master("local-cluster[2,1,600]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    store = Store.create(str(folder / "store"))
    common = {"feature_cols": ["id"], "label_cols": ["y"], "batch_size": 4, "epochs": EPOCHS, "random_seed": 3}
    common |= {"store": store, "scale_lr": False, "verbose": 0}
    backend = SparkBackend(1, min_num_proc=1, max_num_proc=2, **CHANGES)
    estimator = ESTIMATORS[framework](Turns(folder, len(ends)), common | {"backend": backend})
    report = sparkhvd.preflight(spark, estimator=estimator, timeout=100, stdout=io.StringIO())
    threading.Thread(target=end_executors, args=(folder, ends), daemon=True).start()
    rows = spark.range(ROWS, numPartitions=1).selectExpr("id", "0.0D y")
    fitted = estimator.fit(rows)
    sizes = [size for epoch in fitted.getHistory() for size in epoch["sizes"]]
    pairs = len(list(folder.glob("pair-0-*")))
    print_results({"uses": uses(fitted), "sizes": sizes, "pairs": pairs, "report": str(report)})
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
