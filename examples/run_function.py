"""Run a function once per rank on Spark, and add up a tensor over the ranks with an allreduce.

python examples/run_function.py --num-proc 2
"""

from __future__ import annotations

import argparse

import torch
from pyspark.sql import SparkSession

import sparkhvd
import sparkhvd.torch as hvd


def add_ranks(offset: float) -> dict[str, float]:
    """Run on every rank."""
    hvd.init()
    mine = torch.full((3,), offset + hvd.rank())
    total = hvd.allreduce(mine, op=hvd.Sum, name="total")
    print(f"I have {mine.tolist()}, all {hvd.size()} ranks together have {total.tolist()}", flush=True)
    return {"rank": hvd.rank(), "total": total[0].item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks")
    num_proc = parser.parse_args().num_proc

    spark = SparkSession.builder.master(f"local[{num_proc}]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        results = sparkhvd.run(add_ranks, args=(10.0,), num_proc=num_proc)
    finally:
        spark.stop()
    print("results by rank:", results)


if __name__ == "__main__":
    main()
