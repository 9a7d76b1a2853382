"""Runs Spark jobs that an interrupt, a deadline or any other exception in the waiting thread cancels."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from sparkhvd._util.background import in_background, is_done_within
from sparkhvd.compat.spark import inheriting, is_connect
from sparkhvd.data.spark.executor_packages import import_failure
from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")

logger = logging.getLogger(__name__)

# The beginning of the tags of all Spark jobs that this package starts.
TAG_PREFIX = "sparkhvd-"

_CANCEL_SECONDS = 60.0
_COUNTED_SECONDS = 300.0  # Spark reports counts through its event queue, soon after the job
_POLL_SECONDS = 0.5  # an interrupt takes effect between two waits


def run_job(spark: SparkSession, action: Callable[[], T], seconds: float = math.inf) -> T:
    """Run ``action``, which starts Spark jobs, in a thread, and return its result.

    When the waiting thread is interrupted (Ctrl-C in a script or a notebook) or the time is up, the jobs are cancelled.
    The exception propagates once they have ended, at most a minute later, so that the caller can remove their files.

    Raises:
        TimeoutError: it took longer than ``seconds``.
        LaunchError: the executors cannot import sparkhvd.
        Exception: the error of ``action``.
    """
    tag = new_tag()

    def tagged() -> T:
        add_tag(spark, tag)
        return action()

    done = in_background(inheriting(spark, tagged), "sparkhvd-spark-job")
    try:
        if not is_done_within(done, seconds):
            raise TimeoutError(f"The Spark job did not end within {seconds:g} s.")  # noqa: TRY301 - cancelled below
    except BaseException:
        cancel(spark, tag, done)
        raise
    try:
        return done.result()
    except Exception as error:
        if message := import_failure(str(error)):
            raise LaunchError(message) from error
        raise


def counting(rows: DataFrame) -> tuple[DataFrame, Callable[[], int]]:
    """Return the same rows, and a function that returns their number after a job has evaluated them."""
    from pyspark.sql import functions  # noqa: PLC0415  (ranks read this package without Spark)

    spark = rows.sparkSession
    if is_connect(spark):
        from pyspark.sql.connect.observation import Observation  # noqa: PLC0415
    else:
        from pyspark.sql.observation import Observation  # type: ignore[assignment]  # noqa: PLC0415
    observation: Any = Observation()

    def count() -> int:
        counting = in_background(inheriting(spark, lambda: observation.get["rows"]), "sparkhvd-count")
        if not is_done_within(counting, _COUNTED_SECONDS):
            raise TimeoutError(
                f"Spark did not report the number of rows within {_COUNTED_SECONDS:g} s of writing them."
            )
        return int(counting.result())

    return rows.observe(observation, functions.count(functions.lit(1)).alias("rows")), count


def is_local(master: str) -> bool:
    """Return whether this master runs everything in one JVM, without separate executors."""
    return master == "local" or master.startswith("local[")


def new_tag() -> str:
    """Return a tag for the Spark jobs of one action."""
    return f"{TAG_PREFIX}{uuid.uuid4().hex}"


def add_tag(spark: SparkSession, tag: str) -> None:
    """Tag the Spark jobs that this thread starts from now on."""
    if is_connect(spark):
        spark.addTag(tag)
    else:
        # In a classic session, only the thread that set a session's tag can cancel by it. A context's tag serves all.
        spark.sparkContext.addJobTag(tag)


def user_tags(spark: SparkSession) -> frozenset[str]:
    """Return the tags that the user gave to the Spark jobs of this thread."""
    names = spark.getTags() if is_connect(spark) else spark.sparkContext.getJobTags()
    return frozenset(str(name) for name in names if not str(name).startswith(TAG_PREFIX))


def cancel(spark: SparkSession, tag: str, done: Future[T]) -> None:
    """Cancel the jobs with the tag, and wait at most a minute for the action that started them.

    The cancellation is repeated, because a query that is still being planned has no job yet.
    """
    deadline = Deadline.after(_CANCEL_SECONDS)
    pause = _POLL_SECONDS
    while not done.done() and not deadline.expired():
        try:
            if is_connect(spark):
                spark.interruptTag(tag)
            else:
                spark.sparkContext.cancelJobsWithTag(tag)
        except Exception as error:  # noqa: BLE001 - the session may have been stopped; nothing is left to cancel then
            logger.warning("The Spark job %s could not be cancelled: %s", tag, error)
            pause = deadline.remaining()
        wait([done], pause)
    if not done.done():
        logger.warning("Spark did not cancel job %s within %g s.", tag, _CANCEL_SECONDS)
