"""The protocol between ``run`` and the launchers, and the choice of a launcher."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Protocol

from sparkhvd._util.registry import Registry
from sparkhvd.compat.horovod import is_extra, not_installed
from sparkhvd.compat.spark import active_session, check_spark
from sparkhvd.deadline import Deadline
from sparkhvd.driver.host_process import SrunOptions, SshOptions
from sparkhvd.driver.hosts import Host
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.spark.resources import TaskResources
from sparkhvd.errors import ConfigError, LaunchError
from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.task.host.versions import different_versions
from sparkhvd.task.job import Job

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

# Each launcher is one module and one row of this table, or an entry point of another package.
LAUNCHERS = Registry(
    "sparkhvd.launchers",
    MappingProxyType(
        {
            "barrier": "sparkhvd.driver.launchers.barrier:BarrierLauncher",
            "local": "sparkhvd.driver.launchers.local:LocalLauncher",
            "mpi": "sparkhvd.driver.launchers.mpi:MpiLauncher",
            "ray": "sparkhvd.driver.launchers.ray:RayLauncher",
            "ssh": "sparkhvd.driver.launchers.ssh:SshLauncher",
        }
    ),
)


@dataclass(frozen=True)
class LaunchRequest:
    """The arguments of ``run`` that decide where the ranks run.

    Attributes:
        num_proc: number of ranks; None uses all slots.
        spark: the session to use; None uses the active one if the launcher needs one.
        resources: cores and GPUs of a Spark task of this job.
        extra_mpi_args: additional arguments of ``mpirun``.
        hosts: machines to use without Spark.
        access: how to reach the hosts.
        rows: a DataFrame with one partition per rank; None passes no rows.
    """

    num_proc: int | None
    spark: SparkSession | None = None
    resources: TaskResources = field(default_factory=TaskResources)
    extra_mpi_args: tuple[str, ...] = ()
    hosts: tuple[Host, ...] = ()
    access: SshOptions | SrunOptions = field(default_factory=SshOptions)
    rows: DataFrame | None = None

    def session(self) -> SparkSession:
        """Return the session to use.

        Raises:
            LaunchError: there is no active session, or sparkhvd does not support its Spark.
        """
        session = self.spark if self.spark is not None else active_session()
        check_spark(session)
        return session


class LaunchHandle(Protocol):
    """A launched job; ``close`` cancels it if it still runs."""

    def wait_started(self, deadline: Deadline) -> None:
        """Wait until the ranks run (or have ended).

        Raises:
            StartTimeoutError: the ranks did not start by the deadline.
        """

    def results(self) -> list[bytes]:
        """Wait for the end of the job, and return the pickled results in rank order.

        Raises:
            RankFailedError: a rank failed.
            LaunchError: the job was lost.
        """

    def close(self) -> None: ...


class Launcher(Protocol):
    """One way to start the ranks.

    Attributes:
        on_spark: whether the ranks run in Spark tasks.
        takes_rows: whether the launcher passes the rows of a DataFrame to the ranks.

    A launcher that reserves ``cpus_per_task`` and ``gpus_per_task`` without Spark sets ``takes_resources = True``.
    """

    on_spark: ClassVar[bool]
    takes_rows: ClassVar[bool]

    def __init__(self, request: LaunchRequest) -> None: ...

    def reserve(self, deadline: Deadline) -> int:
        """Return the number of ranks to start.

        Raises:
            SlotsError: there are fewer slots than requested ranks.
        """

    def launch(self, job: Job, stream: LogStream) -> LaunchHandle:
        """Start the ranks of a job; their output goes to ``stream``."""


def launcher_class(name: str) -> type[Launcher]:
    """Return the class of the launcher with a name that ``choose_launcher`` returned.

    Raises:
        LaunchError: a package that the launcher needs is not installed.
    """
    try:
        kind: type[Launcher] = LAUNCHERS.load(name)
    except ModuleNotFoundError as error:
        if error.name is None or not is_extra(error.name):
            raise
        raise LaunchError(not_installed(f"launcher={name!r}", error.name)) from error
    return kind


def choose_launcher(launcher: str, use_mpi: bool | None, use_gloo: bool | None, request: LaunchRequest) -> str:
    """Return the name of the launcher to use.

    ``auto`` is the barrier launcher by default. ``use_mpi`` and ``extra_mpi_args`` select the mpi launcher, and
    ``hosts`` selects ssh. Horovod's ``use_gloo`` selects the barrier launcher.

    Raises:
        ConfigError: the launcher is unknown, or the arguments contradict each other.
    """
    if launcher != "auto" and LAUNCHERS.target(launcher) is None:
        names = sorted({*LAUNCHERS.own, *LAUNCHERS.added()})
        raise ConfigError(f"Unknown launcher={launcher!r}; expected 'auto' or one of {names}.")
    by_argument = {"launcher": "" if launcher == "auto" else launcher}
    by_argument |= {"use_mpi=True": "mpi" if use_mpi else "", "use_gloo=True": "barrier" if use_gloo else ""}
    by_argument |= {"extra_mpi_args": "mpi" if request.extra_mpi_args else "", "hosts": "ssh" if request.hosts else ""}
    selected = {argument: name for argument, name in by_argument.items() if name}
    if len(set(selected.values())) > 1:
        arguments = " and ".join(f"{argument} ({name})" for argument, name in selected.items())
        raise ConfigError(f"{arguments} contradict each other: they select different launchers. Pass only one of them.")
    name = next(iter(selected.values()), "barrier")
    if name != "ssh" and request.access != SshOptions():
        raise ConfigError(f"ssh_port and ssh_identity_file require launcher='ssh', got {name!r}. Pass hosts, too.")
    kind = launcher_class(name)
    # A launcher of another package may lack the attribute.
    if request.resources and not getattr(kind, "takes_resources", kind.on_spark):
        raise ConfigError(
            f"gpus_per_task and cpus_per_task configure Spark tasks, but launcher={name!r} starts none. Leave them out."
        )
    if request.rows is not None and not kind.takes_rows:
        raise ConfigError(
            f"launcher={name!r} cannot pass the rows of a DataFrame to the ranks. Use launcher='barrier', or write the "
            "rows to a Store first."
        )
    return name


def warn_of_versions(job: Job, offers: Sequence[TaskOffer]) -> None:
    """Warn if tasks of a job have other versions of the frameworks than the driver."""
    if warning := different_versions(job.versions, offers):
        logger.warning("%s", warning)
