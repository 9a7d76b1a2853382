"""Run by losses.py in a separate process: a driver whose jobs lose executors, or that is killed itself.

python -m tests.launch.losses_script FOLDER [NAME OF A ROW OF losses.DRIVER_FAULTS]
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession

from tests.launch.faults import Fault, complaints, inject
from tests.launch.losses import DRIVER_FAULTS, EXECUTOR_FAULTS, session_on
from tests.scripts import print_results

_CLUSTER = "local-cluster[2,1,700]"


def found(fault: Fault, folder: Path, spark: SparkSession | None) -> tuple[float, str, list[str]]:
    ended = inject(fault, folder, spark)
    return ended.seconds, type(ended.error).__name__, complaints(fault, ended)


def main(folder: Path, names: list[str]) -> None:
    if names:
        fault = next(one for one in DRIVER_FAULTS if one.name == names[0])
        master = _CLUSTER if "cluster" in fault.how else "local[2]"
        spark = None if fault.launcher == "local" else session_on(master)
        rows = {fault.name: found(fault, folder, spark)}
    else:
        spark, rows = session_on(_CLUSTER), {}
        for number, fault in enumerate(EXECUTOR_FAULTS):
            place = folder / str(number)
            place.mkdir()
            rows[fault.name] = found(fault, place, spark)
    print_results(rows)
    if spark is not None and not names:
        spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
