"""A Spark barrier stage: one task per rank, all at the same time."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

from sparkhvd._util.addresses import without_brackets
from sparkhvd._util.background import in_background, is_done_within, is_set_within
from sparkhvd.data.spark.job import add_tag, cancel, is_connect, new_tag
from sparkhvd.deadline import Deadline
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

# How often it is looked whether tasks run of which nothing is heard. Twice as long they may take to begin.
_LOOK_SECONDS = 10.0


class BarrierStage:
    """One Spark job, collected in a thread of its own so that the caller can give up on it.

    Args:
        spark: the session.
        num_tasks: how many tasks.
        task: runs in each of them and yields rows of ``RESULT_SCHEMA``; a module-level function and its data.
        profile: the resources of a task; None leaves it to the session's settings.
        on_end: called when the job has ended, from its thread.
        rows: what the tasks get, one partition each; None is nothing.
        again: whether Spark runs the stage again when it loses an executor; the executors have to reach each other
            for that.
    """

    def __init__(  # noqa: PLR0917
        self,
        spark: SparkSession,
        num_tasks: int,
        task: TaskFunction,
        profile: ResourceProfile | None,
        on_end: Callable[[], None],
        rows: DataFrame | None = None,
        again: bool = True,
    ) -> None:
        self._spark = spark
        self._again = again
        self._num_tasks = num_tasks
        self._task = task
        self._profile = profile
        self._given = rows
        self._tag = new_tag()
        self._progress: _Progress | None = None
        # The user's job group, description and scheduler pool hold in this thread, too.
        self._job = in_background(self._collect, "sparkhvd-job", spark)
        self._job.add_done_callback(lambda _: on_end())

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait for the end of the job; whether it has come."""
        return is_done_within(self._job, seconds)

    @property
    def error(self) -> BaseException | None:
        """Why Spark gave the job up, once it has ended."""
        return self._job.exception() if self._job.done() else None

    @property
    def rows(self) -> Sequence[Row]:
        """What the tasks yielded, once the job has ended."""
        return self._job.result(0)

    def host_of(self, executor: str) -> str:
        """The host of an executor of the session, also of one that was lost; empty where Spark does not say."""
        if is_connect(self._spark):
            return ""
        try:
            store = self._spark.sparkContext._jsc.sc().statusStore()  # noqa: SLF001 - PySpark has no other way
            return host_of(str(store.executorSummary(executor).hostPort()))
        except Exception as error:  # noqa: BLE001 - a sentence without the host is better than none
            logger.debug("Spark does not name the host of executor %s: %s", executor, error)
            return ""

    def task_hosts(self) -> dict[int, str]:
        """The hosts of the tasks of the last attempt that run or failed, by index; empty where Spark does not say."""
        if is_connect(self._spark):
            return {}
        try:
            # The rows that the tasks get may come from stages with as many tasks, which have succeeded.
            tasks = [
                task for stage in self._stages() if stage.numTasks == self._num_tasks for task in self._tasks_of(stage)
            ]
            return {
                int(task.index()): without_brackets(str(task.host()))
                for task in tasks
                if str(task.status()) != "SUCCESS"
            }
        except Exception as error:  # noqa: BLE001 - a sentence without the hosts is better than none
            logger.debug("Spark does not name the hosts of the tasks: %s", error)
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
            started: set by whoever hears from the tasks, and by ``on_end``.
            deadline: when to give up.
            seconds: what the user gave as ``start_timeout``.
            on_running: called now and then when Spark has run all tasks for a while and ``started`` is not set.

        Raises:
            StartTimeoutError: they did not in time.
        """
        ran = False
        while not is_set_within(started, deadline.capped(_LOOK_SECONDS).remaining()):
            if not deadline.expired():
                ran, before = self._all_run(), ran
                if ran and before and on_running is not None:
                    on_running()
                continue
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
        """Cancel the job if it still runs."""
        cancel(self._spark, self._tag, self._job)

    def _collect(self) -> Sequence[Row]:
        add_tag(self._spark, self._tag)
        given = self._given
        if given is None:
            given = self._spark.range(self._num_tasks, numPartitions=self._num_tasks)
        tasks = given.mapInArrow(self._task, RESULT_SCHEMA, barrier=True, profile=self._profile)
        if self._again:
            # The exchange makes the barrier stage a map stage: Spark runs those again when it loses an executor.
            tasks = tasks.repartition(1)
        if not is_connect(self._spark):
            return tasks.collect()
        with closing(_Progress(self._spark)) as self._progress:
            return tasks.collect()

    def _tasks_run(self, seconds: float) -> bool:
        """Whether Spark runs all tasks although none of them reached the driver's log stream."""
        if is_connect(self._spark):
            running = self._running()
            if running is not None and running < self._num_tasks:
                return False
            # What a client is not told it cannot know; ending a job that runs would be worse than waiting.
            logger.warning("No rank reported its start within %g s; still waiting.", seconds)
            return True
        return any(stage.numTasks == self._num_tasks == self._active(stage) for stage in self._stages())

    def _all_run(self) -> bool:
        """Whether Spark runs all tasks, as far as that is certain."""
        if is_connect(self._spark):
            # Of rows that are given, stages before this one may have as many tasks.
            return self._given is None and self._running() == self._num_tasks
        return any(
            stage.numTasks == self._num_tasks == self._active(stage) and self._is_barrier(stage)
            for stage in self._stages()
        )

    def _is_barrier(self, stage: SparkStageInfo) -> bool:
        """Whether a stage is that of the tasks, and none that makes the rows that they get."""
        if self._given is None:
            return True
        store = self._spark.sparkContext._jsc.sc().statusStore()  # noqa: SLF001 - PySpark has no other way
        return bool(store.operationGraphForStage(stage.stageId).rootCluster().getBarrierClusters().nonEmpty())

    def _evaluates(self) -> bool:
        """Whether Spark is at work on the rows that the tasks will get."""
        if is_connect(self._spark):
            return bool(self._running())
        return any(map(self._active, self._stages()))

    def _running(self) -> int | None:
        """How many tasks run, as far as a client of Spark Connect is told."""
        return None if self._progress is None else self._progress.running

    def _stages(self) -> list[SparkStageInfo]:
        context = self._spark.sparkContext
        tracker = context.statusTracker()
        tagged = context._jsc.sc().statusTracker().getJobIdsForTag(self._tag)  # noqa: SLF001 - PySpark does not pass it on
        jobs = [job for number in tagged if (job := tracker.getJobInfo(number)) is not None]
        stages = [tracker.getStageInfo(number) for job in jobs for number in job.stageIds]
        return [stage for stage in stages if stage is not None]

    def _active(self, stage: SparkStageInfo) -> int:
        """How many tasks of a stage run now.

        What Spark counts itself (``numActiveTasks``) leaves out those that began within 100 ms of each other, until
        some other event comes, which may take ten seconds (``spark.ui.liveUpdate.period``).
        """
        return sum(str(task.status()) == "RUNNING" for task in self._tasks_of(stage))

    def _tasks_of(self, stage: SparkStageInfo) -> list[Any]:
        store = self._spark.sparkContext._jsc.sc().statusStore()  # noqa: SLF001 - PySpark has no other way
        tasks = store.taskList(stage.stageId, stage.currentAttemptId, stage.numTasks)
        return [tasks.apply(number) for number in range(tasks.size())]


class _Progress:
    """What a Spark Connect server tells of a thread's running query, every two seconds or so.

    Attributes:
        running: tasks at this moment; None as long as nothing was told.
    """

    def __init__(self, spark: SparkSession) -> None:
        self.running: int | None = None
        self._spark = spark
        self._thread = threading.get_ident()
        self._handler = cast("ProgressHandler", self._note)  # any callable will do
        spark.registerProgressHandler(self._handler)

    def close(self) -> None:
        self._spark.removeProgressHandler(self._handler)

    def _note(self, stages: object, inflight_tasks: int, operation_id: str | None, done: bool) -> None:  # noqa: ARG002
        if threading.get_ident() == self._thread:  # pyspark tells all handlers, each time in the query's own thread
            self.running = inflight_tasks
