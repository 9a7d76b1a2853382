"""Leases of an elastic job on Spark: each is a Spark job of one ordinary task."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from sparkhvd.comm.connect.launch_context import MembershipAddress
from sparkhvd.compat.spark import inheriting, is_connect, is_stopped
from sparkhvd.data.spark.job import add_tag, cancel, new_tag
from sparkhvd.driver.spark.decommissioning import Decommissioning
from sparkhvd.driver.spark.driver_address import driver_hosts
from sparkhvd.driver.spark.gateway import GatewayPipe
from sparkhvd.driver.spark.job_failures import has_ended, is_cancelled, spark_failure
from sparkhvd.task.elastic.lease import run_lease
from sparkhvd.task.entry import entry_of
from sparkhvd.task.job import RESULT_SCHEMA, Job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)


class SparkLeases:
    """Runs leases in Spark tasks.

    Args:
        spark: the session.
    """

    name = "Spark"
    loss = "was lost with its Spark task: its executor or its Python process has ended, or its host is cut off"

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._gateway = GatewayPipe(spark)
        self._decommissioning = Decommissioning.of(spark)
        self._tags: dict[int, str] = {}  # of the Spark jobs, by lease; written by its own thread

    def addresses(self) -> tuple[str, str]:
        """Return the name or address by which tasks reach this driver, and the local address to bind."""
        return driver_hosts(self._spark)

    def inheriting(self, act: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls ``act`` with the user's job group, description and scheduler pool."""
        return inheriting(self._spark, act)

    def run(self, number: int, job: Job, membership: MembershipAddress) -> Exception | None:
        """Run a Spark job with one task, and return its error or None."""
        task = functools.partial(run_lease, job, membership, number)
        try:
            add_tag(self._spark, self._tag(number))
            self._spark.range(1, numPartitions=1).mapInArrow(entry_of(task), RESULT_SCHEMA).collect()
        except Exception as error:  # noqa: BLE001 - the session may have been stopped
            return error
        return None

    def cancel(self, number: int, done: Future[None]) -> None:
        """Cancel the Spark job of a lease unless ``done``."""
        cancel(self._spark, self._tag(number), done)

    def is_stopped(self) -> bool:
        """Return whether the session has been stopped."""
        return is_stopped(self._spark)

    def explain(self, error: Exception) -> tuple[str, bool]:
        """Return the message for an error of a Spark job, and whether the elastic job cannot continue."""
        if is_cancelled(error):  # by the user, who wants the elastic job to end
            return spark_failure(error), True
        if has_ended(error):
            return spark_failure(error), True
        return f"A task of the elastic job failed. {spark_failure(error)}", False

    def others_run(self, submitted: int, connected: int) -> bool:  # noqa: ARG002 - Spark counts waiting jobs
        """Return whether other Spark jobs of this application may wait for cores; always True with Spark Connect."""
        if is_connect(self._spark):
            return True
        try:
            active = self._spark.sparkContext.statusTracker().getActiveJobsIds()
        except Exception as error:  # noqa: BLE001 - the session may have been stopped
            logger.debug("The active Spark jobs are unknown: %s", error)
            return False
        return len(active) > submitted

    def leaving(self, attempts: Mapping[int, int]) -> dict[int, str]:
        """Return the leases on executors that Spark decommissions."""
        watch = self._decommissioning
        if watch is None:
            return {}
        leaving = [number for number, attempt in attempts.items() if watch.affects(attempt, self._tag(number))]
        return dict.fromkeys(leaving, "Spark decommissions the executor")

    def slots(self) -> int:
        """Return 0: the number of leases is constant."""
        return 0

    def _tag(self, number: int) -> str:
        return self._tags.setdefault(number, new_tag())
