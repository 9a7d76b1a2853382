"""A launcher whose ranks Open MPI starts inside Spark tasks."""

from __future__ import annotations

import functools
import logging
import math
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from sparkhvd._util.addresses import LOOPBACK
from sparkhvd._util.background import is_set_within
from sparkhvd.comm.connect.rendezvous import RendezvousServer
from sparkhvd.compat.spark import is_connect
from sparkhvd.config import changed_environment
from sparkhvd.deadline import Deadline
from sparkhvd.driver.launcher import LaunchHandle, LaunchRequest, warn_of_versions
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.mpi.command import (
    find_mpirun,
    is_root,
    mpirun_arguments,
    mpirun_settings,
    network_parameter,
    parameters_of,
)
from sparkhvd.driver.mpi.process import Mpirun, ServiceAddress
from sparkhvd.driver.mpi.remote_shell import LOST_TASK
from sparkhvd.driver.mpi.ring import connect_ring
from sparkhvd.driver.mpi.service import DriverService, mpi_hosts
from sparkhvd.driver.results import failure_of, lost_task, results_of, tasks_not_ready
from sparkhvd.driver.spark.barrier_stage import BarrierStage
from sparkhvd.driver.spark.driver_address import driver_hosts
from sparkhvd.driver.spark.job_failures import spark_failure
from sparkhvd.driver.spark.resources import profile_of
from sparkhvd.driver.spark.slots import reserve_tasks
from sparkhvd.errors import ConfigError, DeadlineExceededError, LaunchError, SparkHvdError
from sparkhvd.rpc.client import Client
from sparkhvd.rpc.frames import is_host_unreachable
from sparkhvd.rpc.interfaces import interfaces
from sparkhvd.rpc.messages import Assign, AwaitTaskEnd, TaskRunning, TaskStatus
from sparkhvd.rpc.registration import TaskOffer, TaskRegistration
from sparkhvd.rpc.server import SILENT_SECONDS, UNANSWERED_SECONDS, Server
from sparkhvd.task.assignment import assign
from sparkhvd.task.devices import mixed_devices
from sparkhvd.task.entry import entry_of
from sparkhvd.task.failure_report import LAUNCH, STARTING, FailureReport, describe_exit
from sparkhvd.task.job import Job
from sparkhvd.task.mpi.job import MpiJob
from sparkhvd.task.mpi.task import run_mpi_task
from sparkhvd.task.supervision import OUTCOME

if TYPE_CHECKING:
    from pyspark.sql import Row

logger = logging.getLogger(__name__)

_ASSIGN_SECONDS = 10.0
_AFTER_START_SECONDS = 1.0
# Spark replaces tasks that are lost before the start. The tasks of the new attempt register within this time.
_NEW_ATTEMPT_SECONDS = 8.0
# After a failure the tasks end their ranks, and the rows with the reports arrive within this time.
_ROWS_SECONDS = 5.0
_MPIRUN_SECONDS = 3.0


class Stage(Protocol):
    """The tasks of a job, such as a ``BarrierStage``."""

    @property
    def error(self) -> BaseException | None: ...

    @property
    def rows(self) -> Sequence[Row]: ...

    def wait(self, seconds: float = math.inf) -> bool: ...

    def host_of(self, executor: str) -> str: ...

    def task_hosts(self) -> dict[int, str]: ...

    def wait_started(self, started: threading.Event, deadline: Deadline, seconds: float) -> None: ...

    def close(self) -> None: ...


StageMaker = Callable[[MpiJob, Callable[[], None]], Stage]


class MpiLauncher:
    """Starts jobs on the cluster of a session; Open MPI must be installed on the driver and the executors."""

    on_spark: ClassVar[bool] = True
    takes_rows: ClassVar[bool] = False

    def __init__(self, request: LaunchRequest) -> None:
        self._request = request
        self._spark = request.session()
        if is_connect(self._spark):
            raise ConfigError(
                "launcher='mpi' needs a driver that the executors can reach and that has mpirun; a Spark Connect "
                "client is not such a driver. Use launcher='barrier'."
            )
        self._mpirun = find_mpirun()

    def reserve(self, deadline: Deadline) -> int:
        return reserve_tasks(self._spark, self._request.num_proc, self._request.resources, deadline)

    def launch(self, job: Job, stream: LogStream) -> LaunchHandle:
        profile = profile_of(self._spark, self._request.resources)

        def stage(mpi_job: MpiJob, on_end: Callable[[], None]) -> Stage:
            task = entry_of(functools.partial(run_mpi_task, mpi_job))
            return BarrierStage(self._spark, job.num_proc, task, profile, on_end)

        own_host, bind_host = driver_hosts(self._spark)
        setup = MpiSetup(own_host, bind_host, self._mpirun, self._request.extra_mpi_args)
        return MpiHandle(job, stream, stage, setup)


@dataclass(frozen=True)
class MpiSetup:
    """The driver's side of a job.

    Attributes:
        own_host: the name or address by which the executors reach the driver's host.
        bind_host: the local address to bind.
        mpirun: the path of ``mpirun``.
        extra_args: the user's arguments of ``mpirun``.
    """

    own_host: str
    bind_host: str
    mpirun: str
    extra_args: tuple[str, ...] = ()


class MpiHandle:
    """One job: the stage, the service that its tasks register with, the rendezvous, and ``mpirun``.

    The driver serves the rendezvous, so it learns the outcome of the job even if all tasks are lost.
    """

    def __init__(self, job: Job, stream: LogStream, make_stage: StageMaker, setup: MpiSetup) -> None:
        own_host, bind_host = setup.own_host, setup.bind_host
        self._stream = stream
        self._setup = setup
        self._deadline = Deadline.after(job.start_timeout)
        self._wake = threading.Event()  # set when the stage or mpirun has ended, or a failure was recorded
        self._stage_has_ended = False
        self._grace: Deadline | None = None  # set when the job has failed
        self._mpirun: Mpirun | None = None  # written by the starter before it ends
        self._watchers: list[tuple[threading.Thread, Client]] = []  # written by the starter before it ends
        with ExitStack() as stack:
            token = secrets.token_bytes(32)
            encrypt = job.config.encrypt
            self._rendezvous = RendezvousServer(token, bind_host, encrypt=encrypt)
            stack.callback(self._rendezvous.close)
            self._service = DriverService(job.num_proc, stream)
            server = stack.enter_context(
                Server(job.secret, self._service, bind_host, name="sparkhvd-driver", encrypt=encrypt)
            )
            stack.callback(self._service.end, "The job has ended.")
            self._addresses = tuple(dict.fromkeys([(bind_host, server.port), (own_host, server.port)]))
            self._job = job.with_driver_addresses(self._addresses)
            rendezvous = tuple(dict.fromkeys([(bind_host, self._rendezvous.port), (own_host, self._rendezvous.port)]))
            self._stage = make_stage(MpiJob(self._job, rendezvous, token), self._stage_ended)
            self._starter = threading.Thread(target=self._start, name="sparkhvd-mpi-start", daemon=True)
            self._starter.start()
            self._stack = stack.pop_all()

    def wait_started(self, deadline: Deadline) -> None:
        self._stage.wait_started(self._stream.started, deadline, self._job.start_timeout)

    def results(self) -> list[bytes]:
        is_set_within(self._wake)
        if self._recorded_failure() is None:
            self._stage.wait()
        elif self._mpirun is not None:  # without mpirun, there are no ranks that could report
            self._grace = Deadline.after(_ROWS_SECONDS)
            self._stage.wait(_ROWS_SECONDS)
        failure = self._recorded_failure()
        if failure is not None:
            raise failure_of(failure)
        if (error := self._stage.error) is not None:
            raise LaunchError(self._spark_failure(error)) from error
        return results_of(self._stage.rows, self._job.num_proc)

    def _spark_failure(self, error: BaseException) -> str:
        return spark_failure(error, self._stage.host_of, self._stage.task_hosts(), self._service.tasks())

    def close(self) -> None:
        with self._stack as stack:  # takes every step, even if another Ctrl-C interrupts one
            stack.callback(self._end_watchers)
            stack.callback(self._stage.close)
            stack.callback(self._end_mpirun)
            stack.callback(self._await_end_of_ranks)
            self._fail("The job was cancelled.")  # does nothing if the job has an outcome
            self._service.end("The job has ended.")
            self._starter.join()

    def _await_end_of_ranks(self) -> None:
        """Wait until the tasks have ended the ranks; a cancelled task would leave them a moment longer."""
        if self._mpirun is not None:
            self._grace = self._grace or Deadline.after(_ROWS_SECONDS)
            self._stage.wait(self._grace.remaining())

    def _end_mpirun(self) -> None:
        if self._mpirun is not None:
            # The time that results() has waited for the rows counts.
            grace = _MPIRUN_SECONDS if self._grace is None else self._grace.capped(_MPIRUN_SECONDS).remaining()
            self._mpirun.close(grace)

    def _end_watchers(self) -> None:
        for _, client in self._watchers:
            client.close()
        for thread, _ in self._watchers:
            thread.join()

    def _stage_ended(self) -> None:
        self._stage_has_ended = True
        self._service.end("Spark aborted the job.")
        self._stream.started.set()
        self._wake.set()

    def _fail(self, why: str) -> None:
        """Record a failure that no rank caused, unless the job already has an outcome. The failure ends all ranks."""
        self._record(FailureReport(-1, "", why, kind=LAUNCH))

    def _record(self, failure: FailureReport) -> None:
        self._rendezvous.set(OUTCOME, failure.to_json())
        self._stream.started.set()
        self._wake.set()

    def _recorded_failure(self) -> FailureReport | None:
        try:
            content = self._rendezvous.get(OUTCOME, Deadline.after(0.0))
        except DeadlineExceededError:
            return None
        return FailureReport.from_json(content) if content else None

    def _start(self) -> None:
        """Wait for the tasks and start ``mpirun``; runs in a thread of its own."""
        try:
            attempt, tasks = self._first_attempt()
            while (problem := self._try_ranks(tasks)) is not None:
                attempt, tasks = self._next_attempt(attempt, problem)
        except SparkHvdError as error:
            if not self._stage_has_ended:  # otherwise Spark's own error has more details
                self._fail(str(error))
        except Exception as error:
            logger.debug("The start of mpirun failed.", exc_info=True)
            self._fail(f"The driver cannot start the ranks: {type(error).__name__}: {str(error).rstrip('.')}.")

    def _first_attempt(self) -> tuple[int, list[TaskRegistration]]:
        # Time out after ``wait_started``, whose error says whether the tasks run at all.
        deadline = Deadline(self._deadline.at + _AFTER_START_SECONDS)
        try:
            return self._service.await_registrations(-1, deadline)
        except DeadlineExceededError:
            if deadline.expired():
                report = tasks_not_ready(self._service.missing(), self._stage.task_hosts(), self._job.start_timeout)
                self._record(report)
            raise

    def _try_ranks(self, tasks: Sequence[TaskRegistration]) -> OSError | None:
        """Start the ranks; return the error if the tasks cannot be reached."""
        try:
            self._start_ranks(tasks)
        except OSError as error:
            return error
        return None

    def _next_attempt(self, attempt: int, problem: OSError) -> tuple[int, list[TaskRegistration]]:
        """Wait for the tasks of the attempt with which Spark replaces a failed one."""
        try:
            return self._service.await_registrations(attempt, self._deadline.capped(_NEW_ATTEMPT_SECONDS))
        except DeadlineExceededError:
            raise LaunchError(
                f"The driver cannot connect to the job's Spark tasks: {problem} The mpi launcher needs connections "
                "from the driver to the executors and back. Use launcher='barrier', which needs none to the executors."
            ) from problem

    def _start_ranks(self, tasks: Sequence[TaskRegistration]) -> None:
        for problem in (task.problem for task in tasks if task.problem):
            raise LaunchError(problem)
        without_orted = sorted({task.offer.host for task in tasks if not task.orted})
        if without_orted:
            raise LaunchError(
                f"There is no orted on the PATH of the executors on {', '.join(without_orted)}. Install Open MPI on "
                "every node of the cluster (Debian: openmpi-bin), or use launcher='barrier', which needs no MPI."
            )
        if mixed := mixed_devices([task.offer for task in tasks], self._job):
            raise LaunchError(mixed)
        warn_of_versions(self._job, [task.offer for task in tasks])
        links = connect_ring(tasks, self._job.secret, encrypt=self._job.config.encrypt)
        offers = [replace(task.offer, bind_host=link.server.address) for task, link in zip(tasks, links, strict=True)]
        try:
            for link in links:
                link.client.ask(Assign(tuple(offers)), Deadline.after(_ASSIGN_SECONDS))
        except BaseException:
            for link in links:
                link.client.close()
            raise
        ranks = {slot.offer.task_index: slot.world.rank for slot in assign(offers)}
        for offer, link in zip(offers, links, strict=True):
            self._watch(ranks[offer.task_index], offer, link.client)
        by_index = {offer.task_index: link.server for offer, link in zip(offers, links, strict=True)}
        hosts = mpi_hosts(offers)
        self._service.serve_hosts({host.name: by_index[min(host.tasks)] for host in hosts})
        networks = [network_parameter(server.interface, server.network) for server in by_index.values()]
        bound = [interface for interface in interfaces() if interface.address == self._setup.bind_host != LOOPBACK]
        networks += [network_parameter(interface.name, interface.network) for interface in bound]
        arguments = mpirun_arguments(hosts, self._setup.extra_args, is_root())
        preset = parameters_of(self._setup.extra_args, changed_environment(dict(self._job.env)))
        settings = mpirun_settings(hosts, networks, preset)
        service = ServiceAddress(self._addresses, self._job.secret, self._job.config.encrypt)
        try:
            self._mpirun = Mpirun(self._setup.mpirun, arguments, settings, service, self._mpirun_ended)
        except OSError as error:  # no task failed, so another attempt of the tasks would not help
            raise LaunchError(f"mpirun cannot be started on the driver's host: {error}.") from error
        self._stream.started.set()

    def _watch(self, rank: int, offer: TaskOffer, client: Client) -> None:
        """Watch the connection to a task: if it breaks before the task has reported its end, the task is lost."""

        def watch() -> None:
            try:
                client.set_ack_timeout(UNANSWERED_SECONDS)
                while isinstance(client.ask(AwaitTaskEnd(), Deadline.after(SILENT_SECONDS)), TaskRunning):
                    continue
            except OSError as error:
                unknown = TaskStatus(offer.task_index, rank, offer.host, phase=STARTING)
                task = self._service.tasks().get(offer.task_index, unknown)
                if is_host_unreachable(error) or isinstance(error, DeadlineExceededError):
                    self._record(lost_task(task, error))
                self._fail(
                    f"Task {offer.task_index} on host {offer.host}, the task of rank {task.rank}, was lost "
                    f"{'before mpirun was started' if self._mpirun is None else f'({task.phase})'}: its "
                    "Python worker or its executor was killed or crashed, as on a host that runs out of memory. See "
                    "the executor's log."
                )

        thread = threading.Thread(target=watch, name="sparkhvd-mpi-task-watch", daemon=True)
        self._watchers.append((thread, client))
        thread.start()

    def _mpirun_ended(self, code: int, output: str) -> None:
        if LOST_TASK in output:
            # The connection of ``_watch`` breaks for the same reason at about the same time, with more details.
            self._wake.wait(UNANSWERED_SECONDS)
        if code != 0:
            self._fail(f"mpirun {describe_exit(code)}. Its last output:\n{output or 'none'}")
