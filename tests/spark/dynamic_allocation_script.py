"""Run by test_run_clusters.py in a separate process: dynamic allocation is set before Spark starts."""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd.errors import LaunchError
from tests.scripts import print_results


def rank() -> str:
    return os.environ["SPARKHVD_RANK"]


def main(how: str, master: str) -> None:
    builder = SparkSession.builder.config("spark.dynamicAllocation.enabled", "true")
    builder = builder.remote(master) if how == "remote" else builder.master(master)
    session = builder.config("spark.ui.enabled", "false").config("spark.log.level", "ERROR").getOrCreate()
    try:
        print_results({"ranks": sparkhvd.run(rank, num_proc=2)})
    except LaunchError as error:
        print_results({"refused": str(error)})
    finally:
        session.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
