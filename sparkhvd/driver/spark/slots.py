"""The number of ranks that the cluster can run at once."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkhvd._util.counts import counted
from sparkhvd.compat.spark import is_connect
from sparkhvd.data.spark.job import is_local
from sparkhvd.deadline import Deadline
from sparkhvd.driver.spark.executor_python import check_executor_python
from sparkhvd.driver.spark.resources import TaskResources, check_master_supports, profile_of, unsupported_resources
from sparkhvd.errors import LaunchError, SlotsError

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

# The longest wait for slots: executors may register late or on demand.
SETTLE_SECONDS = 60.0
# All slots count as registered once their number has not changed for this time.
_STABLE_SECONDS = 3.0
_POLL_SECONDS = 0.2

_SESSION_RESOURCES = TaskResources()
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]")


@dataclass(frozen=True)
class Cluster:
    """The properties of a cluster that decide the number of slots.

    Attributes:
        master: Spark's master URL.
        task_cpus: cores per task: ``spark.task.cpus``, unless the job requests another number.
        count: asks Spark for the slots that are registered now.
        task_gpus: GPUs per task, 0 if the job needs none.
        executor_gpus: ``spark.executor.resource.gpu.amount``.
    """

    master: str
    task_cpus: int
    count: Callable[[], int]
    task_gpus: float = 0
    executor_gpus: int = 0


def _check_session(spark: SparkSession) -> None:
    """Check that ranks can run with the settings of a session.

    Raises:
        LaunchError: Spark runs no barrier stages with these settings, or its tasks run in a Python without sparkhvd.
    """
    check_no_dynamic_allocation(spark)
    check_executor_python(spark)


def has_dynamic_allocation(spark: SparkSession) -> bool:
    """Return whether Spark starts executors on demand; a ``local`` master has none, and ignores the setting."""
    enabled = str(spark.conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true"
    return enabled and not is_local(str(spark.conf.get("spark.master", "")))


def check_no_dynamic_allocation(spark: SparkSession) -> None:
    """Reject dynamic allocation: Spark rejects barrier stages under it, with an unhelpful message (SPARK-24942)."""
    if has_dynamic_allocation(spark):
        raise LaunchError(
            "spark.dynamicAllocation.enabled is true, but Spark does not run barrier stages (all ranks at the same "
            "time) under dynamic allocation. Start the session with spark.dynamicAllocation.enabled=false and a fixed "
            "number of executors (spark.executor.instances, or spark.cores.max on a standalone cluster). Or make the "
            "job elastic, with run_elastic() or min_num_proc: its ranks come and go with the executors."
        )


def describe_cluster(spark: SparkSession, resources: TaskResources = _SESSION_RESOURCES) -> Cluster:
    """Return the properties of the session's cluster for tasks with these resources."""

    def number(name: str, default: str) -> float:
        return float(str(spark.conf.get(name, default)))

    task_cpus = resources.cpus or int(number("spark.task.cpus", "1"))
    task_gpus = resources.gpus or number("spark.task.resource.gpu.amount", "0")
    executor_gpus = int(number("spark.executor.resource.gpu.amount", "0"))
    if is_connect(spark):

        def count() -> int:
            cores = _cores_by_plan(spark)
            by_cores = cores // task_cpus
            executors = _executors(spark, cores) if task_gpus else None
            return by_cores if executors is None else min(by_cores, executors * math.floor(executor_gpus / task_gpus))

        return Cluster("connect", task_cpus, count, task_gpus, executor_gpus)
    master = str(spark.sparkContext.master)
    check_master_supports(master, resources)
    profile = profile_of(spark, resources)
    return Cluster(master, task_cpus, lambda: _concurrent_tasks(spark, profile), task_gpus, executor_gpus)


def setting_that_hides_slots(spark: SparkSession) -> str:
    """Return the setting that prevents a Spark Connect client from counting slots by partitions; empty if none."""
    if not is_connect(spark):
        return ""
    names = ("spark.default.parallelism", "spark.sql.leafNodeDefaultParallelism")
    return next((f"{name}={value}" for name in names if (value := spark.conf.get(name, None)) is not None), "")


def reserve_tasks(spark: SparkSession, num_proc: int | None, resources: TaskResources, deadline: Deadline) -> int:
    """Return the number of ranks to start in a barrier stage of this session; see ``reserve``.

    Raises:
        LaunchError: Spark does not run barrier stages with this session's settings, or ignores a task's resources.
        SlotsError: there are too few slots.
    """
    _check_session(spark)
    if setting := setting_that_hides_slots(spark):
        if num_proc is None:
            raise SlotsError(
                "num_proc=None uses all slots, but their number is unknown: a Spark Connect client counts them by the "
                f"partitions of a query, which {setting} of this cluster overrides. Set num_proc."
            )
        return num_proc
    return reserve(describe_cluster(spark, resources), num_proc, deadline)


def reserve(cluster: Cluster, num_proc: int | None, deadline: Deadline) -> int:
    """Return the number of ranks to start: ``num_proc``, or all slots if it is None.

    Raises:
        SlotsError: there are fewer slots than ``num_proc``; at once if the cluster's size is fixed, else after
            ``SETTLE_SECONDS`` or at the deadline.
    """
    fixed = fixed_slots(cluster)
    if fixed is not None and num_proc is not None and num_proc > fixed:
        raise SlotsError(_too_few_slots(cluster, num_proc, fixed, waited=None))
    began = time.monotonic()
    settle = deadline.capped(SETTLE_SECONDS)
    slots, since = cluster.count(), began
    while not _has_enough(slots, num_proc if num_proc is not None else fixed, time.monotonic() - since):
        if settle.expired():
            if num_proc is None and slots > 0:
                return slots
            waited = time.monotonic() - began
            raise SlotsError(_too_few_slots(cluster, num_proc or 1, slots, waited))
        time.sleep(_POLL_SECONDS)  # PySpark has no event for new executors
        current_slots = cluster.count()
        if current_slots != slots:
            slots, since = current_slots, time.monotonic()
    return num_proc if num_proc is not None else slots


def _has_enough(slots: int, wanted: int | None, stable_for: float) -> bool:
    if wanted is not None:
        return slots >= wanted > 0
    return slots > 0 and stable_for >= _STABLE_SECONDS


def fixed_slots(cluster: Cluster) -> int | None:
    """Return the number of slots of a master with a fixed size; None for all others."""
    if is_local(cluster.master):
        return cluster.count()
    if match := _LOCAL_CLUSTER.fullmatch(cluster.master):
        return int(match[1]) * _slots_per_executor(cluster, int(match[2]))
    return None


def _slots_per_executor(cluster: Cluster, cores: int) -> int:
    slots = cores // cluster.task_cpus
    return min(slots, math.floor(cluster.executor_gpus / cluster.task_gpus)) if cluster.task_gpus else slots


def largest_growth(cluster: Cluster, settings: Callable[[str], str | None]) -> tuple[int | None, str]:
    """Return the number of slots to which dynamic allocation can grow, and the setting that limits it.

    Args:
        cluster: the cluster.
        settings: returns a setting of Spark, or None.

    Returns:
        The number is None if no setting limits it, or if it depends on the sizes of the cluster's machines.
    """
    master = settings("spark.master") or cluster.master
    local = _LOCAL_CLUSTER.fullmatch(master)
    # The executors of a standalone cluster have all cores of their machine by default.
    default_cores = local[2] if local else None if master.startswith("spark://") else "1"
    cores = settings("spark.executor.cores") or default_cores
    limits: list[tuple[int, str]] = []
    if (most_cores := settings("spark.cores.max")) is not None and (local or master.startswith("spark://")):
        most_slots = (
            int(most_cores) // cluster.task_cpus
            if cores is None
            else int(most_cores) // int(cores) * _slots_per_executor(cluster, int(cores))
        )
        limits.append((most_slots, f"spark.cores.max={most_cores}"))
    if cores is not None:
        per_executor = _slots_per_executor(cluster, int(cores))
        if (executors := settings("spark.dynamicAllocation.maxExecutors")) is not None:
            limits.append((int(executors) * per_executor, f"spark.dynamicAllocation.maxExecutors={executors}"))
        if local:
            limits.append((int(local[1]) * (int(local[2]) // int(cores)) * per_executor, f"master {master}"))
    return min(limits, default=(None, ""), key=lambda limit: limit[0] or 0)


def _too_few_slots(cluster: Cluster, num_proc: int, slots: int, waited: float | None) -> str:
    """Return the message for too few slots: both numbers and the settings to change."""
    after = "" if waited is None else f" after waiting {waited:.0f} s for executors"
    return (
        f"num_proc={num_proc} is more than the {counted(slots, 'slot')} of the cluster{after} "
        f"(master {cluster.master}, {_per_task(cluster)}). {_remedy(cluster, num_proc)}"
    )


def _per_task(cluster: Cluster) -> str:
    gpus = f", {cluster.task_gpus:g} GPUs per task" if cluster.task_gpus else ""
    return f"spark.task.cpus={cluster.task_cpus}{gpus}"


def _remedy(cluster: Cluster, num_proc: int) -> str:
    if cluster.task_gpus and cluster.executor_gpus < cluster.task_gpus:
        return (
            "The executors have too few GPUs: start the session with spark.executor.resource.gpu.amount and a "
            "discovery script (spark.executor.resource.gpu.discoveryScript)."
        )
    lower = [f"spark.task.cpus={cluster.task_cpus}"] if cluster.task_cpus > 1 else []
    lower += [f"{cluster.task_gpus:g} GPUs per task"] if cluster.task_gpus else []
    or_lower = "or lower num_proc" + (f", or lower {' or '.join(lower)}" if lower else "")
    if cluster.master.startswith("local-cluster"):
        return f"Start the session with a master like local-cluster[{num_proc},{cluster.task_cpus},1024], {or_lower}."
    if cluster.master.startswith("local"):
        return f"Start the session with master local[{num_proc * cluster.task_cpus}], {or_lower}."
    if cluster.master.startswith("spark://"):
        return f"Add workers, raise spark.cores.max, {or_lower}."
    return f"Raise spark.executor.instances or spark.executor.cores, {or_lower}."


def _concurrent_tasks(spark: SparkSession, profile: ResourceProfile | None) -> int:
    scala_context = spark.sparkContext._jsc.sc()  # noqa: SLF001 - Spark has no public count of slots
    profiles = scala_context.resourceProfileManager()
    if profile is None:
        return int(scala_context.maxNumConcurrentTasks(profiles.defaultResourceProfile()))
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # noqa: PLC0415 - only with Spark

    java_profile = profile._java_resource_profile  # noqa: SLF001
    try:
        profiles.addResourceProfile(java_profile)
    except Py4JJavaError as error:  # up to Spark 3.5 on YARN and Kubernetes
        raise unsupported_resources(
            f"with master {spark.sparkContext.master}", str(error.java_exception.getMessage())
        ) from error
    return int(scala_context.maxNumConcurrentTasks(java_profile))


def _executors(spark: SparkSession, cores: int) -> int | None:
    """Return the number of executors of a Spark Connect server; None if its settings do not determine it."""
    if match := _LOCAL_CLUSTER.fullmatch(str(spark.conf.get("spark.master", ""))):
        return int(match[1])
    if (instances := spark.conf.get("spark.executor.instances", None)) is not None:
        return int(str(instances))
    executor_cores = spark.conf.get("spark.executor.cores", None)
    return None if executor_cores is None else cores // int(str(executor_cores))


def _cores_by_plan(spark: SparkSession) -> int:
    """Count the cores from a Spark Connect client: Spark plans as many splits of a range as it has cores.

    Nothing runs, so the answer does not wait for jobs that keep the slots busy.
    """
    rows: Any = spark.range(1)
    plan = str(rows._explain_string(extended=True))  # noqa: SLF001 - explain() prints
    splits = re.search(r"splits=(?:Some\()?(\d+)", plan)
    if splits is None:
        raise LaunchError(
            "The number of slots of this cluster is unknown: Spark's plan of a range does not show it. Start the "
            f"driver without Spark Connect. The plan is:\n{plan}"
        )
    return int(splits[1])
