"""Run by test_run_clusters.py in a process of its own: one process can hold one SparkContext only."""

from __future__ import annotations

import json
import os
import sys

from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd.errors import RankFailedError, SlotsError


def place() -> dict[str, int]:
    print("hello")
    return {n.lower(): int(os.environ[f"SPARKHVD_{n}"]) for n in ("RANK", "SIZE", "LOCAL_RANK", "CROSS_SIZE")}


def fail() -> None:
    if os.environ["SPARKHVD_RANK"] == "1":
        raise ValueError("on purpose")


def main(master: str) -> None:
    builder = SparkSession.builder.master(master).config("spark.executor.memory", "700m")
    session = builder.config("spark.ui.enabled", "false").config("spark.log.level", "ERROR").getOrCreate()
    try:
        found: dict[str, object] = {"places": [sparkhvd.run(place, num_proc=2), sparkhvd.run(place)]}
        try:
            sparkhvd.run(fail, num_proc=2)
        except RankFailedError as error:
            found["failure"] = str(error)
        try:
            sparkhvd.run(place, num_proc=3, start_timeout=2)
        except SlotsError as error:
            found["slots"] = str(error)
    finally:
        session.stop()
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
