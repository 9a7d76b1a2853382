"""The default launcher: one Spark barrier stage whose tasks start one worker each."""

from __future__ import annotations

import functools
import logging
import threading
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkhvd.deadline import Deadline
from sparkhvd.driver.launcher import LaunchHandle
from sparkhvd.driver.slots import is_connect
from sparkhvd.errors import LaunchError, RankFailedError, StartTimeoutError
from sparkhvd.task.job import FAILURE, RESULT_SCHEMA, Job
from sparkhvd.task.main import run_task
from sparkhvd.task.report import NOT_STARTED, TOO_LARGE, FailureReport

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

logger = logging.getLogger(__name__)

_CANCEL_SECONDS = 30.0


class BarrierLauncher:
    """Starts jobs on the cluster of a session."""

    def __init__(self, spark: SparkSession, started: threading.Event) -> None:
        self._spark = spark
        self._started = started  # set by whoever hears from the tasks

    def launch(self, job: Job) -> LaunchHandle:
        return BarrierHandle(self._spark, job, self._started)


class BarrierHandle:
    """One Spark job, collected in a thread of its own so that the caller can give up on it."""

    def __init__(self, spark: SparkSession, job: Job, started: threading.Event) -> None:
        from pyspark import InheritableThread  # noqa: PLC0415 - importing this module needs no Spark

        self._spark = spark
        self._job = job
        self._tag = f"sparkhvd-{uuid.uuid4()}"
        self._started = started
        self._finished = threading.Event()
        self._rows: Sequence[Row] = ()  # written before _finished is set
        self._error: Exception | None = None  # written before _finished is set
        # The user's job group, description and scheduler pool hold in this thread, too.
        self._thread = InheritableThread(target=self._collect, session=spark)
        self._thread.name = "sparkhvd-job"
        self._thread.daemon = True
        self._thread.start()

    def wait_started(self, deadline: Deadline) -> None:
        if self._started.wait(deadline.remaining()) or self._tasks_run():
            return
        raise StartTimeoutError(
            f"Timed out waiting for Spark tasks to start. The cluster has slots for {self._job.num_proc} ranks, but "
            f"they did not become free at the same time within start_timeout={self._job.start_timeout:g} s: other "
            "jobs keep them busy. Wait for those, give this job a cluster of its own, or raise start_timeout."
        )

    def results(self) -> list[bytes]:
        self._finished.wait()
        if self._error is not None:
            raise LaunchError(spark_failure(self._error)) from self._error
        return results_of(self._rows, self._job.num_proc)

    def close(self) -> None:
        if not self._finished.is_set():
            self._cancel()
        self._thread.join(_CANCEL_SECONDS)
        if self._thread.is_alive():
            logger.warning("Spark did not cancel job %s within %g s.", self._tag, _CANCEL_SECONDS)

    def _collect(self) -> None:
        try:
            self._add_tag()
            tasks = self._spark.range(self._job.num_proc, numPartitions=self._job.num_proc).mapInArrow(
                functools.partial(run_task, self._job), RESULT_SCHEMA, barrier=True
            )
            # The exchange makes the barrier stage a map stage: Spark runs those again when it loses an executor.
            self._rows = tasks.repartition(1).collect()
        except Exception as error:  # noqa: BLE001 - results() raises it in the caller's thread
            self._error = error
        finally:
            self._finished.set()
            self._started.set()

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

    def _tasks_run(self) -> bool:
        """Whether Spark runs all tasks although none of them reached the driver's log stream."""
        if is_connect(self._spark):
            # A client cannot see the tasks; ending a job that runs would be worse than waiting for one that does not.
            logger.warning("No rank reported its start within %g s; still waiting.", self._job.start_timeout)
            return True
        context = self._spark.sparkContext
        tracker = context.statusTracker()
        tagged = context._jsc.sc().statusTracker().getJobIdsForTag(self._tag)  # noqa: SLF001 - PySpark does not pass it on
        jobs = [job for number in tagged if (job := tracker.getJobInfo(number)) is not None]
        stages = [tracker.getStageInfo(number) for job in jobs for number in job.stageIds]
        return any(
            stage is not None and stage.numTasks == self._job.num_proc == stage.numActiveTasks for stage in stages
        )


def results_of(rows: Sequence[Row], num_proc: int) -> list[bytes]:
    """The pickled results in rank order, put together from their chunks.

    Raises:
        RankFailedError: one of the rows reports a failure.
        LaunchError: a rank's result is missing.
    """
    for row in rows:
        if row.kind == FAILURE:
            raise failure_of(FailureReport.from_json(bytes(row.content)))
    contents: dict[int, list[bytes]] = {}
    for row in sorted(rows, key=lambda one: (one.rank, one.chunk)):
        contents.setdefault(row.rank, []).append(bytes(row.content))
    missing = sorted(set(range(num_proc)) - set(contents))
    if missing:
        raise LaunchError(f"Spark returned no result of ranks {missing}.")
    return [b"".join(contents[rank]) for rank in range(num_proc)]


def failure_of(report: FailureReport) -> LaunchError:
    """The exception that says what a report says."""
    message = f"{report.sentence()}."
    if report.traceback:
        message += f"\n\nTraceback of rank {report.rank}:\n{report.traceback}"
    elif report.stderr_tail:
        message += f"\n\nThe last lines that rank {report.rank} wrote to stderr:\n{report.stderr_tail}"
    if report.kind == NOT_STARTED:
        return StartTimeoutError(f"{message} Raise start_timeout, or see what its imports wait for.")
    if report.kind == TOO_LARGE:
        return LaunchError(message)
    return RankFailedError(
        message,
        rank=report.rank,
        host=report.host,
        remote_traceback=report.traceback,
        stderr_tail=report.stderr_tail,
    )


def spark_failure(error: Exception) -> str:
    """What to tell when Spark itself gave the job up."""
    text = str(error)
    if "No module named 'sparkhvd'" in text:
        return "The executors cannot import sparkhvd; install it on every node of the cluster."
    text = "\n".join(line for line in text.splitlines() if line.strip() and not line.startswith("\tat "))
    shortened = text if len(text) <= 4000 else f"{text[:4000]} ..."
    return f"Spark gave the job up; no rank reported a failure of its own. Spark says: {shortened}"
