"""A Spark barrier stage: one task per rank, all running at the same time."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

from sparkhvd._util.addresses import without_brackets
from sparkhvd._util.background import in_background, is_done_within, is_set_within
from sparkhvd._util.counts import counted
from sparkhvd.compat.spark import inheriting, is_connect, map_in_barrier
from sparkhvd.data.spark.job import TAG_PREFIX, add_tag, cancel, new_tag
from sparkhvd.deadline import Deadline
from sparkhvd.driver.spark.gateway import GatewayPipe
from sparkhvd.errors import StartTimeoutError
from sparkhvd.task.job import RESULT_SCHEMA
from sparkhvd.task.task_info import host_of

if TYPE_CHECKING:
    from pyspark import SparkStageInfo
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.connect.shell.progress import ProgressHandler

    from sparkhvd.task.entry import TaskFunction

logger = logging.getLogger(__name__)

# The interval between checks for tasks that run but have not reported. They have two intervals to report.
_POLL_SECONDS = 10.0


class BarrierStage:
    """One Spark job, collected in a thread of its own so that the caller can stop waiting for it.

    Args:
        spark: the session.
        num_tasks: number of tasks.
        task: runs in each task and yields rows of ``RESULT_SCHEMA``; a module-level function and its data.
        profile: the resources of a task; None uses the session's settings.
        on_end: called when the job has ended, from the thread that collects it.
        rows: the input of the tasks, one partition each; None passes no rows.
        retry: whether Spark retries the stage when it loses an executor; the executors must reach each other for that.
    """

    def __init__(  # noqa: PLR0917
        self,
        spark: SparkSession,
        num_tasks: int,
        task: TaskFunction,
        profile: ResourceProfile | None,
        on_end: Callable[[], None],
        rows: DataFrame | None = None,
        retry: bool = True,
    ) -> None:
        self._spark = spark
        self._retry = retry
        self._num_tasks = num_tasks
        self._task = task
        self._profile = profile
        self._input = rows
        self._tag = new_tag()
        self._gateway = GatewayPipe(spark)
        self._progress: _Progress | None = None
        # The thread inherits the user's job group, description and scheduler pool.
        self._job = in_background(inheriting(spark, self._collect), "sparkhvd-job")
        self._job.add_done_callback(lambda _: on_end())

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait for the end of the job, and return whether it has ended."""
        return is_done_within(self._job, seconds)

    @property
    def error(self) -> BaseException | None:
        """Return the error with which Spark ended the job; None while it runs or if it succeeded."""
        return self._job.exception() if self._job.done() else None

    @property
    def rows(self) -> Sequence[Row]:
        """Return the rows that the tasks yielded, once the job has ended."""
        return self._job.result(0)

    def host_of(self, executor: str) -> str:
        """Return the host of an executor of the session, even a lost one; empty if Spark does not report it."""
        if is_connect(self._spark):
            return ""
        try:
            store = self._spark.sparkContext._jsc.sc().statusStore()  # noqa: SLF001 - no PySpark API
            return host_of(str(store.executorSummary(executor).hostPort()))
        except Exception as error:  # noqa: BLE001 - an error message without the host is better than none
            logger.debug("Spark does not report the host of executor %s: %s", executor, error)
            return ""

    def task_hosts(self) -> dict[int, str]:
        """Return the hosts of running and failed tasks of the last attempt, by index; empty if Spark reports none."""
        if is_connect(self._spark):
            return {}
        try:
            # Stages that compute the input rows may have as many tasks; those tasks have succeeded.
            stages = [stage for stage in self._stages() if stage.numTasks == self._num_tasks]
            tasks = [task for stage in stages for task in _tasks_of(self._spark, stage)]
            return {
                int(task.index()): without_brackets(str(task.host()))
                for task in tasks
                if str(task.status()) != "SUCCESS"
            }
        except Exception as error:  # noqa: BLE001 - an error message without the hosts is better than none
            logger.debug("Spark does not report the hosts of the tasks: %s", error)
            return {}

    def wait_started(
        self,
        started: threading.Event,
        deadline: Deadline,
        seconds: float,
        on_running: Callable[[], None] | None = None,
    ) -> None:
        """Wait until the tasks run (or the job has ended).

        Args:
            started: set when the tasks report that they run, and by ``on_end``.
            deadline: when to stop waiting.
            seconds: the user's ``start_timeout``.
            on_running: called periodically if Spark has run all tasks for a while and ``started`` is not set.

        Raises:
            StartTimeoutError: the tasks did not start by the deadline.
        """
        all_run = False
        while not is_set_within(started, deadline.capped(_POLL_SECONDS).remaining()):
            if not deadline.expired():
                all_run, all_ran_before = self._all_run(), all_run
                if all_run and all_ran_before and on_running is not None:
                    on_running()
                continue
            if self._tasks_run(seconds):
                return
            if self._input is None or not self._computes_input():
                break
            deadline = Deadline.after(seconds)
        else:
            return
        raise StartTimeoutError(
            "Timed out waiting for Spark tasks to start. The cluster has slots for "
            f"{counted(self._num_tasks, 'rank')}, but they were not free at the same time within "
            f"start_timeout={seconds:g} s: other jobs keep them busy. Wait for those jobs, run this job on a cluster "
            "of its own, or raise start_timeout."
        )

    def close(self) -> None:
        """Cancel the job if it still runs."""
        cancel(self._spark, self._tag, self._job)

    def _collect(self) -> Sequence[Row]:
        add_tag(self._spark, self._tag)
        rows = self._input
        if rows is None:
            rows = self._spark.range(self._num_tasks, numPartitions=self._num_tasks)
        tasks = map_in_barrier(rows, self._task, RESULT_SCHEMA, self._profile)
        if self._retry:
            # The exchange makes the barrier stage a map stage, which Spark retries when it loses an executor.
            tasks = tasks.repartition(1)
        if not is_connect(self._spark):
            return tasks.collect()
        with closing(_Progress(self._spark)) as self._progress:
            return tasks.collect()

    def _tasks_run(self, seconds: float) -> bool:
        """Return whether Spark runs all tasks although none of them has reached the driver's log stream."""
        if is_connect(self._spark):
            running = self._running()
            if running is not None and running < self._num_tasks:
                return False
            # A client may lack the number of tasks, and cancelling a running job would be worse than waiting.
            logger.warning("No rank reported its start within %g s. Still waiting.", seconds)
            return True
        return any(stage.numTasks == self._num_tasks == _active(self._spark, stage) for stage in self._stages())

    def _all_run(self) -> bool:
        """Return whether Spark runs all tasks, as far as that is certain."""
        if is_connect(self._spark):
            # Stages that compute the input rows may have as many tasks.
            return self._input is None and self._running() == self._num_tasks
        return any(
            stage.numTasks == self._num_tasks == _active(self._spark, stage) and self._is_barrier(stage)
            for stage in self._stages()
        )

    def _is_barrier(self, stage: SparkStageInfo) -> bool:
        """Return whether a stage is the barrier stage, rather than one that computes its input rows."""
        return self._input is None or _is_barrier(self._spark, stage)

    def _computes_input(self) -> bool:
        """Return whether Spark computes the input rows of the tasks."""
        if is_connect(self._spark):
            return bool(self._running())
        return any(_active(self._spark, stage) for stage in self._stages())

    def _running(self) -> int | None:
        """Return the number of running tasks that the Spark Connect server reported; None before its first report."""
        return None if self._progress is None else self._progress.running

    def _stages(self) -> list[SparkStageInfo]:
        context = self._spark.sparkContext
        tracker = context.statusTracker()
        tagged = context._jsc.sc().statusTracker().getJobIdsForTag(self._tag)  # noqa: SLF001 - no PySpark API
        jobs = [job for number in tagged if (job := tracker.getJobInfo(number)) is not None]
        stages = [tracker.getStageInfo(number) for job in jobs for number in job.stageIds]
        return [stage for stage in stages if stage is not None]


def running_tasks(spark: SparkSession) -> int:
    """Return the number of tasks of all Spark jobs that run now."""
    tracker = spark.sparkContext.statusTracker()
    stages = filter(None, map(tracker.getStageInfo, tracker.getActiveStageIds()))
    return sum(_active(spark, stage) for stage in stages)


def barrier_tasks_of_others(spark: SparkSession) -> int:
    """Return the number of tasks that run now in barrier stages of other programs, such as ``TorchDistributor``."""
    tracker = spark.sparkContext.statusTracker()
    store = spark.sparkContext._jsc.sc().statusStore()  # noqa: SLF001 - no PySpark API
    total = 0
    for number in tracker.getActiveJobsIds():
        try:
            job = tracker.getJobInfo(number)
            if job is None or f",{TAG_PREFIX}" in f",{store.job(number).jobTags().mkString(',')}":
                continue
            stages = filter(None, map(tracker.getStageInfo, job.stageIds))
            total += sum(_active(spark, stage) for stage in stages if _is_barrier(spark, stage))
        except Exception as error:  # noqa: BLE001 - Spark has forgotten a job that has just ended
            logger.debug("Spark does not report the tasks of job %s: %s", number, error)
    return total


def _is_barrier(spark: SparkSession, stage: SparkStageInfo) -> bool:
    store = spark.sparkContext._jsc.sc().statusStore()  # noqa: SLF001 - no PySpark API
    return bool(store.operationGraphForStage(stage.stageId).rootCluster().getBarrierClusters().nonEmpty())


def _active(spark: SparkSession, stage: SparkStageInfo) -> int:
    """Return the number of tasks of a stage that run now.

    Spark's own count (``numActiveTasks``) omits tasks that start within 100 ms of each other until the next event,
    which may take ten seconds (``spark.ui.liveUpdate.period``).
    """
    return sum(str(task.status()) == "RUNNING" for task in _tasks_of(spark, stage))


def _tasks_of(spark: SparkSession, stage: SparkStageInfo) -> list[Any]:
    store = spark.sparkContext._jsc.sc().statusStore()  # noqa: SLF001 - no PySpark API
    tasks = store.taskList(stage.stageId, stage.currentAttemptId, stage.numTasks)
    return [tasks.apply(number) for number in range(tasks.size())]


class _Progress:
    """The progress of a thread's running query, which a Spark Connect server reports about every two seconds.

    Attributes:
        running: number of running tasks; None before the first report.
    """

    def __init__(self, spark: SparkSession) -> None:
        self.running: int | None = None
        self._spark = spark
        self._thread = threading.get_ident()
        self._handler = cast("ProgressHandler", self._note)  # pyspark calls any callable
        spark.registerProgressHandler(self._handler)

    def close(self) -> None:
        self._spark.removeProgressHandler(self._handler)

    def _note(self, stages: object, inflight_tasks: int, operation_id: str | None, done: bool) -> None:  # noqa: ARG002
        if threading.get_ident() == self._thread:  # pyspark calls all handlers, from the thread of the query
            self.running = inflight_tasks
