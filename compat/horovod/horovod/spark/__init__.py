"""``horovod.spark``: runs functions on the executors of a Spark cluster."""

from __future__ import annotations

from sparkhvd import run, run_elastic

__all__ = ["run", "run_elastic"]
