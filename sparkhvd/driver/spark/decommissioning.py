"""Which tasks run on executors that Spark decommissions, for example because their spot instance is about to end.

Spark announces this to neither the tasks nor a Python driver, only within the driver's JVM. So Spark Connect does not
tell it either.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sparkhvd.compat.spark import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_SETTING = "spark.decommission.enabled"


class Decommissioning:
    """Looks up the executors of tasks, and asks Spark whether it decommissions them.

    Args:
        context: the ``SparkContext`` of the driver's JVM.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._executors: dict[int, str] = {}  # by the id of the task's attempt

    @classmethod
    def of(cls, spark: SparkSession) -> Decommissioning | None:
        """Return None if Spark decommissions no executors, or does not tell which."""
        if is_connect(spark) or str(spark.conf.get(_SETTING, "false")).lower() != "true":
            return None
        return cls(spark.sparkContext._jsc.sc())  # noqa: SLF001 - no PySpark API

    def affects(self, attempt: int, tag: str) -> bool:
        """Return whether Spark decommissions the executor of a running task.

        Args:
            attempt: the id of the task's attempt.
            tag: the tag of the task's Spark job.
        """
        try:
            executor = self._executors.get(attempt) or self._find_executor(attempt, tag)
            if not executor:
                return False
            self._executors[attempt] = executor
            return bool(self._context.taskScheduler().getExecutorDecommissionState(executor).isDefined())
        except Exception as error:  # noqa: BLE001 - py4j raises different errors if the session has been stopped
            logger.debug("Spark did not tell whether it decommissions an executor: %s", error)
            return False

    def _find_executor(self, attempt: int, tag: str) -> str:
        tracker, store = self._context.statusTracker(), self._context.statusStore()
        for job in tracker.getJobIdsForTag(tag):
            info = tracker.getJobInfo(job)
            for stage in info.get().stageIds() if info.isDefined() else ():
                tasks = store.taskList(stage, 0, 100)  # of a stage with one task: its attempts
                for index in range(tasks.size()):
                    task = tasks.apply(index)
                    if task.taskId() == attempt:
                        return str(task.executorId())
        return ""
