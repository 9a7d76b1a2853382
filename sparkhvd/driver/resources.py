"""What a Spark task of a job gets, where that differs from the rest of the application."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkhvd.errors import LaunchError

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession


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
    return ResourceProfileBuilder().require(requests).build


def refuse_where_ignored(master: str, resources: TaskResources) -> None:
    """Spark runs stages with resources of their own on clusters only.

    Raises:
        LaunchError: this master is none.
    """
    if resources and re.match(r"local(\[|$)", master):
        raise LaunchError(
            f"gpus_per_task and cpus_per_task do not work with master {master}: Spark gives a stage resources of its "
            "own on standalone, YARN, Kubernetes and local-cluster. Leave them out here; spark.task.cpus works."
        )
