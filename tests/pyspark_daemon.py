"""Spark's daemon, which forks the Python workers of a session, with the imports of most workers.

Without it, each worker that trains or predicts imports PyTorch and pandas. Spark ends idle workers after a minute.

Spark starts a second daemon for RDDs, which ``createDataFrame`` uses for lists. Its workers need no imports.
"""

from __future__ import annotations

import contextlib
import gc
import os

from pyspark.daemon import manager

if "SPARK_SIMPLIFIED_TRACEBACK" in os.environ:  # not the daemon for RDDs
    with contextlib.suppress(ImportError):  # a test's Python has no packages
        import sparkhvd.task.main  # noqa: F401
        import tests.spark.rank_imports  # noqa: F401

if __name__ == "__main__":
    gc.freeze()  # a worker collects garbage after every task
    manager()
