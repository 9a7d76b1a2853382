"""The pipe by which Spark's JVM notices the end of the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkhvd._util.processes.forks import close_in_children
from sparkhvd.compat.spark import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class GatewayPipe:
    """Keeps the pipe between pyspark and its JVM out of forked children, as long as this object exists.

    The JVM, and with it the application, ends when no process holds the pipe. A driver that ``spark-submit`` has
    started has no pipe: its JVM is its parent.
    """

    def __init__(self, spark: SparkSession) -> None:
        # ``getattr`` would look for a name in the JVM.
        jvm = None if is_connect(spark) else vars(spark.sparkContext._gateway).get("proc")  # noqa: SLF001
        self._pipe = None if jvm is None else jvm.stdin
        close_in_children(self)

    def leave_to_parent(self) -> None:
        """Close a forked child's copy of the pipe."""
        if self._pipe is not None:
            self._pipe.close()
