"""The cores and GPUs of a job's Spark tasks, if they differ from the rest of the application."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkhvd.compat.spark import is_connect
from sparkhvd.data.spark.job import is_local
from sparkhvd.errors import LaunchError

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession


logger = logging.getLogger(__name__)

_SUPPORTED = "Spark supports resources per stage only on standalone, YARN, Kubernetes and local-cluster"


@dataclass(frozen=True)
class TaskResources:
    """Resources per task; None uses ``spark.task.cpus`` or ``spark.task.resource.gpu.amount``."""

    cpus: int | None = None
    gpus: float | None = None

    def __bool__(self) -> bool:
        return self != TaskResources()


def profile_of(spark: SparkSession, resources: TaskResources) -> ResourceProfile | None:
    """Return the profile of the job's stage; None for the session's default."""
    if not resources:
        return None
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests  # noqa: PLC0415 - only with Spark

    # A profile replaces all of the session's settings.
    gpus = resources.gpus or float(str(spark.conf.get("spark.task.resource.gpu.amount", "0")))
    requests = TaskResourceRequests().cpus(resources.cpus or int(str(spark.conf.get("spark.task.cpus", "1"))))
    if gpus:
        requests.resource("gpu", gpus)
    profile = ResourceProfileBuilder().require(requests).build
    if is_connect(spark):
        _make_on_server(spark, profile)
    return profile


def _make_on_server(spark: SparkSession, profile: ResourceProfile) -> None:
    """Create a profile on the Spark Connect server now, because no session is active in the thread of the job.

    Raises:
        LaunchError: the server's cluster does not support resources per stage.
    """
    from pyspark.errors import PySparkException  # noqa: PLC0415 - only with Spark

    connect: Any = type(spark)  # no other API selects the server
    connect._set_default_and_active_session(spark)  # noqa: SLF001
    try:
        logger.debug("The resource profile of this job has the id %d on the server.", profile.id)
    except PySparkException as error:
        if "ResourceProfiles are only supported" not in str(error):
            raise LaunchError(f"The Spark Connect server rejected the resources of this job: {error}") from error
        raise unsupported_resources("on this Spark Connect server") from error


def check_master_supports(master: str, resources: TaskResources) -> None:
    """Check that a master supports resources per stage: Spark ignores them on a ``local`` master.

    Raises:
        LaunchError: the master does not support them.
    """
    if resources and is_local(master):
        raise unsupported_resources(f"with master {master}")


def unsupported_resources(where: str, reason: str = _SUPPORTED) -> LaunchError:
    """Return the error for a cluster that does not support resources per stage."""
    return LaunchError(
        f"gpus_per_task and cpus_per_task do not work {where}: {reason.removesuffix('.')}. Leave them out, and set "
        "spark.task.cpus and spark.task.resource.gpu.amount instead."
    )
