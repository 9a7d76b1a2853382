"""The seam between ``run`` and the ways to start a job's ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from sparkhvd.deadline import Deadline
from sparkhvd.driver.host_process import SshOptions
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

# A launcher is one module, and one row here.
_LAUNCHERS = {
    "barrier": "sparkhvd.driver.launchers.barrier:BarrierLauncher",
    "local": "sparkhvd.driver.launchers.local:LocalLauncher",
    "mpi": "sparkhvd.driver.launchers.mpi:MpiLauncher",
    "ssh": "sparkhvd.driver.launchers.ssh:SshLauncher",
}
# Those whose ranks run in Spark tasks.
_ON_SPARK = ("barrier", "mpi")


@dataclass(frozen=True)
class LaunchRequest:
    """What the caller of ``run`` said about where the ranks run.

    Attributes:
        num_proc: number of ranks; None is all that there is room for.
        spark: the session to use; None takes the active one where one is needed.
        resources: what a Spark task of this job gets.
        extra_mpi_args: more arguments of ``mpirun``.
        hosts: machines to use without Spark.
        ssh: how to reach them.
        rows: has one partition per rank, which goes to it; None gives no rows.
    """

    num_proc: int | None
    spark: SparkSession | None = None
    resources: TaskResources = field(default_factory=TaskResources)
    extra_mpi_args: tuple[str, ...] = ()
    hosts: tuple[Host, ...] = ()
    ssh: SshOptions = field(default_factory=SshOptions)
    rows: DataFrame | None = None

    def session(self) -> SparkSession:
        """The session to use.

        Raises:
            LaunchError: there is none.
        """
        return self.spark if self.spark is not None else active_session()


class LaunchHandle(Protocol):
    """A job on its way; ``close`` ends it if it still runs."""

    def wait_started(self, deadline: Deadline) -> None:
        """Wait until the ranks run (or have ended).

        Raises:
            StartTimeoutError: they did not in time.
        """

    def results(self) -> list[bytes]:
        """Wait for the end of the job: the pickled results in rank order.

        Raises:
            RankFailedError: a rank failed.
            LaunchError: the job was lost.
        """

    def close(self) -> None: ...


class Launcher(Protocol):
    """One way to start the ranks; made with a ``LaunchRequest``."""

    def reserve(self, deadline: Deadline) -> int:
        """The number of ranks to start.

        Raises:
            SlotsError: there is no room for as many as were asked for.
        """

    def launch(self, job: Job, stream: LogStream) -> LaunchHandle:
        """Start the ranks of a job; their output goes to ``stream``."""


def launcher_for(name: str, request: LaunchRequest) -> Launcher:
    """The launcher of that name, as ``choose`` returned it."""
    module, _, class_name = _LAUNCHERS[name].partition(":")
    return cast(Callable[[LaunchRequest], Launcher], getattr(import_module(module), class_name))(request)


def choose(launcher: str, use_mpi: bool | None, use_gloo: bool | None, request: LaunchRequest) -> str:
    """The name of the launcher to use.

    ``auto`` is the barrier launcher, unless ``use_mpi`` or ``extra_mpi_args`` ask for Open MPI, or ``hosts`` for ssh.
    Horovod's ``use_gloo`` is the barrier launcher.

    Raises:
        ConfigError: there is no such launcher, or what was asked for contradicts itself.
    """
    if launcher != "auto" and launcher not in _LAUNCHERS:
        raise ConfigError(f"launcher={launcher!r} does not exist; there are 'auto' and {sorted(_LAUNCHERS)}.")
    wishes = {"launcher": "" if launcher == "auto" else launcher}
    wishes |= {"use_mpi=True": "mpi" if use_mpi else "", "use_gloo=True": "barrier" if use_gloo else ""}
    wishes |= {"extra_mpi_args": "mpi" if request.extra_mpi_args else "", "hosts": "ssh" if request.hosts else ""}
    asked = {argument: name for argument, name in wishes.items() if name}
    if len(set(asked.values())) > 1:
        words = " and ".join(f"{argument} ({name})" for argument, name in asked.items())
        raise ConfigError(f"{words} contradict each other: they ask for different launchers.")
    name = next(iter(asked.values()), "barrier")
    if name != "ssh" and request.ssh != SshOptions():
        raise ConfigError(f"ssh_port and ssh_identity_file are for launcher='ssh', not {name!r}; give hosts, too.")
    if name not in _ON_SPARK and request.resources:
        raise ConfigError(f"gpus_per_task and cpus_per_task are for Spark tasks; launcher={name!r} starts none.")
    if name != "barrier" and request.rows is not None:
        raise ConfigError(
            f"launcher={name!r} cannot give the rows of a DataFrame to the ranks; take launcher='barrier', or write "
            "the rows to a Store first."
        )
    return name


def warn_of_versions(job: Job, offers: Sequence[TaskOffer]) -> None:
    """Say where the tasks of a job have other versions of the driver's frameworks."""
    if said := different_versions(job.versions, offers):
        logger.warning("%s", said)


def active_session() -> SparkSession:
    """The session that is active in this thread or was the last one made.

    Raises:
        LaunchError: there is none.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415 - pyspark is loaded when a job is run, not before

    session = SparkSession.getActiveSession()
    if session is None:
        raise LaunchError(
            "There is no active SparkSession. Make one with SparkSession.builder.getOrCreate(), pass spark=, or run "
            "the ranks beside this process with launcher='local'."
        )
    return session
