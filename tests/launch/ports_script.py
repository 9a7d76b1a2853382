"""Run by test_faults.py in a separate network, where all ports may be taken.

python -m tests.launch.ports_script FOLDER [thoroughly]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from tests.launch.faults import PHASES, PORT_FAULTS, complaints, inject
from tests.scripts import print_results


def main(folder: Path, thoroughly: bool) -> None:
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    faults = [fault for fault in PORT_FAULTS if thoroughly or fault.always]
    spark = None
    if thoroughly:
        builder = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false")
        spark = builder.config("spark.driver.host", "127.0.0.1").config("spark.log.level", "ERROR").getOrCreate()
    results: dict[str, object] = {}
    # This process itself takes all ports for those before registration, so they come last.
    for number, fault in enumerate(sorted(faults, key=lambda one: one.phase == PHASES[0])):
        place = folder / str(number)
        place.mkdir(parents=True)
        ended = inject(fault, place, spark)
        results[fault.name] = [ended.seconds, type(ended.error).__name__, complaints(fault, ended)]
    print_results(results)
    if spark is not None:
        spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["thoroughly"])
