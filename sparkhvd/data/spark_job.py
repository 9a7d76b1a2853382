"""One Spark job that can be cancelled: by an interrupt, a deadline or any other exception in the thread that waits."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_CANCEL_SECONDS = 60.0
_LOOK_SECONDS = 0.5  # an interrupt is delivered between two waits


def run_job(spark: SparkSession, action: Callable[[], object]) -> None:
    """Run ``action``, which starts Spark jobs, in a thread, and wait for it.

    When the waiting thread is interrupted (control-C in a script or a notebook), the jobs are cancelled and have ended
    before the exception goes on: what they wrote can be removed then.

    Raises:
        Exception: what ``action`` raised.
    """
    from pyspark import InheritableThread  # noqa: PLC0415 - importing this module needs no Spark

    tag = f"sparkhvd-{uuid.uuid4().hex}"
    ended = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            _add_tag(spark, tag)
            action()
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            failed.append(error)
        finally:
            ended.set()

    thread = InheritableThread(target=run, session=spark)
    thread.name = "sparkhvd-spark-job"
    thread.start()
    try:
        while not ended.wait(_LOOK_SECONDS):
            pass
    except BaseException:
        _cancel(spark, tag, ended)
        raise
    finally:
        thread.join(_CANCEL_SECONDS)
    if failed:
        raise failed[0]


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is one of Spark Connect, which has no JVM beside this process."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def _add_tag(spark: SparkSession, tag: str) -> None:
    if is_connect(spark):
        spark.addTag(tag)
    else:
        # Tags of a classic session are known to the thread that set them only; those of the context to all.
        spark.sparkContext.addJobTag(tag)


def _cancel(spark: SparkSession, tag: str, ended: threading.Event) -> None:
    try:
        if is_connect(spark):
            spark.interruptTag(tag)
        else:
            spark.sparkContext.cancelJobsWithTag(tag)
    except Exception as error:  # noqa: BLE001 - the session may have been stopped; nothing is left to cancel then
        logger.warning("The Spark job %s could not be cancelled: %s", tag, error)
    if not ended.wait(_CANCEL_SECONDS):
        logger.warning("Spark did not cancel job %s within %g s.", tag, _CANCEL_SECONDS)
