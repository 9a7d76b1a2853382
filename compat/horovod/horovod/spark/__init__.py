"""``horovod.spark``: runs functions on the executors of a Spark cluster."""

from __future__ import annotations

import functools
from typing import Any

import sparkhvd
from sparkhvd import run

__all__ = ["run", "run_elastic"]


@functools.wraps(sparkhvd.run_elastic, assigned=("__doc__",))
def run_elastic(*args: Any, min_np: int | None = None, max_np: int | None = None, **options: Any) -> list[Any]:
    former = {"min_num_proc": min_np, "max_num_proc": max_np}
    return sparkhvd.run_elastic(
        *args, **options, **{name: value for name, value in former.items() if value is not None}
    )
