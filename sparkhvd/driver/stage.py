"""A Spark barrier stage: one task per rank, all at the same time."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from sparkhvd.data.spark_job import is_connect
from sparkhvd.deadline import Deadline
from sparkhvd.errors import StartTimeoutError
from sparkhvd.task.job import RESULT_SCHEMA

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkStageInfo
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, Row, SparkSession

logger = logging.getLogger(__name__)

_CANCEL_SECONDS = 30.0

TaskFunction = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]


class BarrierStage:
    """One Spark job, collected in a thread of its own so that the caller can give up on it.

    Args:
        spark: the session.
        num_tasks: how many tasks.
        task: runs in each of them and yields rows of ``RESULT_SCHEMA``; a module-level function and its data.
        profile: the resources of a task; None leaves it to the session's settings.
        on_end: called when the job has ended, from its thread.
        rows: what the tasks get, one partition each; None is nothing.
    """

    def __init__(  # noqa: PLR0917
        self,
        spark: SparkSession,
        num_tasks: int,
        task: TaskFunction,
        profile: ResourceProfile | None,
        on_end: Callable[[], None],
        rows: DataFrame | None = None,
    ) -> None:
        from pyspark import InheritableThread  # noqa: PLC0415 - importing this module needs no Spark

        self._spark = spark
        self._num_tasks = num_tasks
        self._task = task
        self._profile = profile
        self._on_end = on_end
        self._given = rows
        self._tag = f"sparkhvd-{uuid.uuid4()}"
        self._finished = threading.Event()
        self._rows: Sequence[Row] = ()  # written before _finished is set
        self._error: Exception | None = None  # written before _finished is set
        # The user's job group, description and scheduler pool hold in this thread, too.
        self._thread = InheritableThread(target=self._collect, session=spark)
        self._thread.name = "sparkhvd-job"
        self._thread.daemon = True
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of the job; whether it has come."""
        return self._finished.wait(seconds)

    @property
    def error(self) -> Exception | None:
        """Why Spark gave the job up, once it has ended."""
        return self._error

    @property
    def rows(self) -> Sequence[Row]:
        """What the tasks yielded, once the job has ended."""
        return self._rows

    def wait_started(self, started: threading.Event, deadline: Deadline, seconds: float) -> None:
        """Wait until the tasks run (or the job has ended).

        Args:
            started: set by whoever hears from the tasks, and by ``on_end``.
            deadline: when to give up.
            seconds: what the user gave as ``start_timeout``.

        Raises:
            StartTimeoutError: they did not in time.
        """
        while not started.wait(deadline.remaining()):
            if self._tasks_run(seconds):
                return
            if self._given is None or not self._evaluates():
                break
            deadline = Deadline.after(seconds)
        else:
            return
        raise StartTimeoutError(
            f"Timed out waiting for Spark tasks to start. The cluster has slots for {self._num_tasks} ranks, but "
            f"they did not become free at the same time within start_timeout={seconds:g} s: other "
            "jobs keep them busy. Wait for those, give this job a cluster of its own, or raise start_timeout."
        )

    def close(self) -> None:
        """Cancel the job if it still runs, and join its thread."""
        if not self._finished.is_set():
            self._cancel()
        self._thread.join(_CANCEL_SECONDS)
        if self._thread.is_alive():
            logger.warning("Spark did not cancel job %s within %g s.", self._tag, _CANCEL_SECONDS)

    def _collect(self) -> None:
        try:
            self._add_tag()
            given = self._given
            if given is None:
                given = self._spark.range(self._num_tasks, numPartitions=self._num_tasks)
            tasks = given.mapInArrow(self._task, RESULT_SCHEMA, barrier=True, profile=self._profile)
            # The exchange makes the barrier stage a map stage: Spark runs those again when it loses an executor.
            self._rows = tasks.repartition(1).collect()
        except Exception as error:  # noqa: BLE001 - whoever waits for the result raises it in the caller's thread
            self._error = error
        finally:
            self._finished.set()
            self._on_end()

    def _add_tag(self) -> None:
        if is_connect(self._spark):
            self._spark.addTag(self._tag)
        else:
            # Tags of a classic session are known to the thread that set them only; those of the context to all.
            self._spark.sparkContext.addJobTag(self._tag)

    def _cancel(self) -> None:
        try:
            if is_connect(self._spark):
                self._spark.interruptTag(self._tag)
            else:
                self._spark.sparkContext.cancelJobsWithTag(self._tag)
        except Exception as error:  # noqa: BLE001 - the session may have been stopped; nothing is left to cancel then
            logger.warning("Job %s could not be cancelled: %s", self._tag, error)

    def _tasks_run(self, seconds: float) -> bool:
        """Whether Spark runs all tasks although none of them reached the driver's log stream."""
        if is_connect(self._spark):
            # A client cannot see the tasks; ending a job that runs would be worse than waiting for one that does not.
            logger.warning("No rank reported its start within %g s; still waiting.", seconds)
            return True
        return any(stage.numTasks == self._num_tasks == stage.numActiveTasks for stage in self._stages())

    def _evaluates(self) -> bool:
        """Whether Spark is at work on the rows that the tasks will get."""
        return any(stage.numActiveTasks for stage in self._stages())

    def _stages(self) -> list[SparkStageInfo]:
        context = self._spark.sparkContext
        tracker = context.statusTracker()
        tagged = context._jsc.sc().statusTracker().getJobIdsForTag(self._tag)  # noqa: SLF001 - PySpark does not pass it on
        jobs = [job for number in tagged if (job := tracker.getJobInfo(number)) is not None]
        stages = [tracker.getStageInfo(number) for job in jobs for number in job.stageIds]
        return [stage for stage in stages if stage is not None]
