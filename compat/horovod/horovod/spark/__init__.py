"""``horovod.spark``: runs functions on the executors of a Spark cluster."""

from __future__ import annotations

import functools
from typing import Any

import sparkhvd
from sparkhvd import run

__all__ = ["run", "run_elastic"]


@functools.wraps(sparkhvd.run_elastic, assigned=("__doc__",))
def run_elastic(*args: Any, min_np: int | None = None, max_np: int | None = None, **options: Any) -> list[Any]:
    limits = {"min_num_proc": min_np, "max_num_proc": max_np}
    options |= {name: limit for name, limit in limits.items() if limit is not None}
    return sparkhvd.run_elastic(*args, **options)
