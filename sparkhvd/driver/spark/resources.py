"""What a Spark task of a job gets, where that differs from the rest of the application."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkhvd.data.spark.job import is_connect, is_local
from sparkhvd.errors import LaunchError

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession


logger = logging.getLogger(__name__)

NO_RESOURCES_OF_ITS_OWN = (
    "gpus_per_task and cpus_per_task do not work {where}: Spark gives a stage resources of its own on standalone, "
    "YARN, Kubernetes and local-cluster. Leave them out here; spark.task.cpus and spark.task.resource.gpu.amount work."
)


@dataclass(frozen=True)
class TaskResources:
    """Resources per task; None leaves one to ``spark.task.cpus`` or ``spark.task.resource.gpu.amount``."""

    cpus: int | None = None
    gpus: float | None = None

    def __bool__(self) -> bool:
        return self != TaskResources()


def profile_of(spark: SparkSession, resources: TaskResources) -> ResourceProfile | None:
    """The profile for the job's stage, None for the session's own."""
    if not resources:
        return None
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests  # noqa: PLC0415 - only with Spark

    # A profile replaces the session's settings as a whole.
    gpus = resources.gpus or float(str(spark.conf.get("spark.task.resource.gpu.amount", "0")))
    requests = TaskResourceRequests().cpus(resources.cpus or int(str(spark.conf.get("spark.task.cpus", "1"))))
    if gpus:
        requests.resource("gpu", gpus)
    profile = ResourceProfileBuilder().require(requests).build
    if is_connect(spark):
        _make_on_server(spark, profile)
    return profile


def _make_on_server(spark: SparkSession, profile: ResourceProfile) -> None:
    """Let a Spark Connect server make a profile now; later, in the thread of the job, no session would be active.

    Raises:
        LaunchError: the server's cluster is none that gives a stage resources of its own.
    """
    from pyspark.errors import PySparkException  # noqa: PLC0415 - only with Spark

    connect: Any = type(spark)  # there is no other way to say whose server
    connect._set_default_and_active_session(spark)  # noqa: SLF001
    try:
        logger.debug("The server calls the profile of this job %d.", profile.id)
    except PySparkException as error:
        if "ResourceProfiles are only supported" not in str(error):
            raise LaunchError(f"The Spark Connect server refuses the resources of this job: {error}") from error
        raise LaunchError(NO_RESOURCES_OF_ITS_OWN.format(where="on this Spark Connect server")) from error


def refuse_where_ignored(master: str, resources: TaskResources) -> None:
    """Spark runs stages with resources of their own on clusters only.

    Raises:
        LaunchError: this master is none.
    """
    if resources and is_local(master):
        raise LaunchError(NO_RESOURCES_OF_ITS_OWN.format(where=f"with master {master}"))
