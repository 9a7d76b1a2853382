"""The function that runs in every Spark task of a job of the mpi launcher."""

from __future__ import annotations

import json
import queue
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from sparkhvd._util.counts import counted
from sparkhvd.comm.connect.rendezvous import RendezvousClient
from sparkhvd.config import changed_environment, yarn_container
from sparkhvd.deadline import Deadline
from sparkhvd.errors import DeadlineExceededError, LaunchError
from sparkhvd.rpc.client import Client, connect
from sparkhvd.rpc.interfaces import candidates
from sparkhvd.rpc.messages import Acknowledged, Flush, RankConnected, Register, Rejected, TaskStatus
from sparkhvd.rpc.protection import require_encryption
from sparkhvd.rpc.registration import TaskOffer, TaskRegistration, TaskServer
from sparkhvd.rpc.server import Server
from sparkhvd.task.assignment import Slot, assign, assign_started
from sparkhvd.task.devices import write_device_map
from sparkhvd.task.failure_report import LAUNCH, FailureReport
from sparkhvd.task.host.host_hash import host_hash
from sparkhvd.task.host.ranks import run_ranks
from sparkhvd.task.host.versions import local_versions
from sparkhvd.task.job import Job
from sparkhvd.task.mpi.host_ranks import RankListener, orted_failure
from sparkhvd.task.mpi.job import (
    EXECUTABLE,
    FOLDER,
    RANK_SECRET,
    RANK_SOCKET,
    MpiJob,
)
from sparkhvd.task.mpi.service import TaskService
from sparkhvd.task.rank import JobPlan, worker_spec
from sparkhvd.task.result_rows import result_rows
from sparkhvd.task.supervision import NOTE_SECONDS, OUTCOME, Outcome, Supervision, await_outcome, watch_outcome
from sparkhvd.task.task_info import TaskInfo, current_task_info
from sparkhvd.task.worker.import_path import IMPORT_PATH, import_path
from sparkhvd.task.worker.output import DriverLog
from sparkhvd.task.worker.process import WorkerProcess, not_started
from sparkhvd.task.worker.threads import thread_defaults

# The interval at which a task that waits for the driver checks that the driver is alive.
_DRIVER_CHECK_SECONDS = 2.0
# How long a task waits for the driver to report why mpirun ended, before it reports its own reason.
_DRIVER_SECONDS = 5.0
# How long a task waits for orted to end after all ranks of the host have succeeded.
_ORTED_SECONDS = 3.0
# The interval at which a host that waits for other hosts' ranks checks whether the job has ended.
_POLL_SECONDS = 1.0
# The prefix of the keys under which the hosts publish the ranks that ``mpirun`` started; the host's index follows.
_RANKS = "mpi/ranks/"


@dataclass(frozen=True)
class _AssignedTask:
    """The job, the plan and the connections of a task to which the driver has assigned ranks."""

    job: MpiJob
    plan: JobPlan
    task: TaskInfo
    service: TaskService
    deadline: Deadline
    driver: Client

    def report_phase(self, rank: int, phase: str) -> None:
        """Report a rank's phase to the driver without waiting for an answer; no requests follow on this connection."""
        offer = self.plan.slots[rank].offer
        with suppress(OSError):
            self.driver.send(
                TaskStatus(offer.task_index, rank, offer.host, self.task.attempt, phase), Deadline.after(NOTE_SECONDS)
            )


def serve(job: MpiJob, task: TaskInfo) -> dict[int, bytes | Outcome]:
    """Take part in a job: register, wait for the plan, and start the host's ranks if this is the host's first task.

    Args:
        job: the job.
        task: this task.

    Returns:
        The pickled results of the ranks that this task supervised, or the outcome of a job that failed, by rank.

    Raises:
        LaunchError: this task cannot register with the driver, or infrastructure was lost.
    """
    encrypt = job.job.config.encrypt
    if encrypt:
        require_encryption(task.host)
    deadline = Deadline.after(job.job.start_timeout)
    secret = job.job.secret
    with ExitStack() as stack:
        service = TaskService(secret, encrypt=encrypt)
        path, problem = changed_environment(dict(job.job.env)).get("PATH"), ""
        # Report problems to the driver, which ends the job. An exception here would make Spark retry the stage in vain.
        if job.job.executable and shutil.which(job.job.executable, path=path) is None:
            problem = f"The ranks on host {task.host} {not_started(job.job.executable, 'no such program')}."
        try:
            own_interfaces = candidates(job.job.nics, task.host, task.hosts)
        except LaunchError as error:
            own_interfaces, problem = [], str(error)
        servers = {
            interface: stack.enter_context(
                Server(secret, service, interface.address, name="sparkhvd-task", encrypt=encrypt)
            )
            for interface in own_interfaces
        }
        stack.callback(service.close)  # before the servers close, so that waiting clients get their response
        key = host_hash(yarn_container())
        versions = local_versions(job.job.versions)
        offer = TaskOffer(task.index, key, task.host, "", task.devices, task.device_kind, versions)
        listening = tuple(
            TaskServer(interface.name, interface.address, server.port, interface.network)
            for interface, server in servers.items()
        )
        orted = shutil.which("orted", path=path) or ""
        driver = _register(job.job, TaskRegistration(task.attempt, offer, listening, orted, problem), deadline, stack)
        offers = _await_plan(driver, service, task)
        plan = JobPlan(tuple(assign(offers)), job.rendezvous, job.token, encrypt)
        own_address = next(slot for slot in plan.slots if slot.offer.task_index == task.index).offer.bind_host
        for interface, server in servers.items():
            if interface.address != own_address:
                server.close()  # the driver chose own_address, which other hosts can reach
        own_slots = [slot for slot in plan.slots if slot.offer.host_hash == offer.host_hash]
        if min(slot.offer.task_index for slot in own_slots) == task.index:
            return _run_host_ranks(_AssignedTask(job, plan, task, service, deadline, driver), own_slots)
        _await_job_end(plan, task, deadline)
        return {}


def _register(job: Job, registration: TaskRegistration, deadline: Deadline, stack: ExitStack) -> Client:
    """Register this task and return the connection to the driver."""
    where = f"Task {registration.offer.task_index} on host {registration.offer.host} cannot register with the driver"
    try:
        driver = connect(job.driver_addresses, job.secret, deadline, encrypt=job.config.encrypt)
        stack.callback(driver.close)
        answer = driver.ask(Register(registration), deadline)
    except OSError as error:
        raise LaunchError(f"{where}: {error}") from error
    if not isinstance(answer, Acknowledged):
        raise LaunchError(f"{where}: {answer.reason if isinstance(answer, Rejected) else answer}")
    return driver


def _await_plan(driver: Client, service: TaskService, task: TaskInfo) -> tuple[TaskOffer, ...]:
    """Return the driver's assignment; the driver enforces the time limit and reports missing tasks.

    Raises:
        LaunchError: the driver ended before it assigned the ranks.
    """
    while (plan := service.plan_within(_DRIVER_CHECK_SECONDS)) is None:
        try:
            driver.ask(Flush(), Deadline.after(NOTE_SECONDS))
        except OSError as error:
            raise LaunchError(
                f"Task {task.index} on host {task.host} lost the driver before it assigned the ranks: "
                f"{str(error).removesuffix('.')}. See the driver's log for the reason."
            ) from error
    return plan


def _run_host_ranks(assigned: _AssignedTask, own_slots: list[Slot]) -> dict[int, bytes | Outcome]:
    """Let ``orted`` start the ranks of this host, and supervise them."""
    job, service = assigned.job.job, assigned.service
    with ExitStack() as stack:
        # Close the logs last: a driver that no longer responds delays closing them, which must not keep orted alive.
        logs = stack.enter_context(ExitStack())
        events: queue.SimpleQueue[object] = queue.SimpleQueue()
        stack.enter_context(_watching(assigned.plan, events))
        listener = stack.enter_context(closing(RankListener()))
        stack.callback(service.close)
        service.allow_start(_environment(job, assigned.task, listener))
        workers: dict[int, WorkerProcess] = {}
        log_of_rank: dict[int, DriverLog] = {}

        def has_ended() -> bool:
            return service.orted_ended() is not None or not events.empty()

        try:
            while len(workers) < len(own_slots):
                started, spawned = listener.accept(job.preload, assigned.deadline, has_ended)
                log = log_of_rank[started.rank] = DriverLog(job)
                logs.callback(log.close)
                log.rank = started.rank
                worker = workers[started.rank] = WorkerProcess(spawned, log)
                stack.callback(worker.close)
                worker.output.start()
                if why := _wrong_number_of_ranks(started, assigned.plan, own_slots):
                    return {own_slots[0].world.rank: _end_job(assigned.plan, FailureReport(-1, "", why, kind=LAUNCH))}
            assigned = replace(assigned, plan=_plan_with_started_ranks(assigned, own_slots, list(workers), has_ended))
        except LaunchError:
            return {own_slots[0].world.rank: _not_started(assigned.plan, own_slots, list(workers), service)}
        if 0 in log_of_rank:
            write_device_map(assigned.plan.slots, log_of_rank[0])
        for rank, worker in workers.items():
            worker.send(worker_spec(job, assigned.plan, assigned.plan.slots[rank]))
        contents = run_ranks(assigned.plan, workers, assigned.deadline, assigned.task.parent, assigned.report_phase)
        if all(isinstance(content, bytes) for content in contents.values()):
            service.await_orted_end(_ORTED_SECONDS)
        return contents


def _wrong_number_of_ranks(started: RankConnected, plan: JobPlan, own_slots: Sequence[Slot]) -> str:
    """Return an error message if ``mpirun`` did not start one rank per task on this host; otherwise empty."""
    if (started.size, started.local_size) == (len(plan.slots), len(own_slots)):
        return ""
    return (
        f"mpirun started {started.local_size} of {started.size} ranks on host {own_slots[0].offer.host}, where Spark "
        f"runs {len(own_slots)} of this job's {len(plan.slots)} tasks. extra_mpi_args and OMPI_MCA_* variables may "
        "change the order of the ranks but not their number on a host: leave out settings of hosts, slots and "
        "processes per node."
    )


def _plan_with_started_ranks(
    assigned: _AssignedTask, own_slots: Sequence[Slot], ranks: Sequence[int], has_ended: Callable[[], bool]
) -> JobPlan:
    """Return the plan, with the ranks that ``mpirun`` has started on each host.

    These may differ from the assigned ranks, because the user's arguments of ``mpirun`` may change their order.

    Raises:
        LaunchError: the job ended before all hosts had published their ranks.
    """
    plan = assigned.plan
    hosts = list(dict.fromkeys(slot.offer.host_hash for slot in plan.slots))
    published: list[bytes] | None = None
    with plan.connect(Deadline.after(NOTE_SECONDS)) as client:
        host_index = hosts.index(own_slots[0].offer.host_hash)
        client.set(f"{_RANKS}{host_index}", json.dumps(ranks).encode(), Deadline.after(NOTE_SECONDS))
        while published is None:
            try:
                published = client.get_all(_RANKS, range(len(hosts)), assigned.deadline.capped(_POLL_SECONDS))
            except DeadlineExceededError:
                if has_ended() or assigned.deadline.expired():
                    raise LaunchError("not all hosts have published their ranks") from None
    ranks_of = dict(zip(hosts, map(json.loads, published), strict=True))
    return replace(plan, slots=tuple(assign_started([slot.offer for slot in plan.slots], ranks_of)))


@contextmanager
def _watching(plan: JobPlan, events: queue.SimpleQueue[object]) -> Iterator[RendezvousClient]:
    """Put the outcome of the job, or the loss of the driver, into ``events`` within this block."""
    with plan.connect(Deadline.after(NOTE_SECONDS)) as client:
        watcher = watch_outcome(client, events)
        try:
            yield client
        finally:
            client.close()
            watcher.join()


def _environment(job: Job, task: TaskInfo, listener: RankListener) -> dict[str, str]:
    """Return the environment of ``orted`` and its ranks: that of this process, changed by the user and sparkhvd."""
    rank_variables = {
        EXECUTABLE: job.executable or sys.executable,
        FOLDER: str(Path.cwd()),
        RANK_SOCKET: listener.name,
        RANK_SECRET: listener.secret_path,
    }
    env = dict(job.env)
    path = import_path(job.executable, env.get(IMPORT_PATH))
    return changed_environment({**env, IMPORT_PATH: path, **rank_variables}, thread_defaults(task.cpus))


def _not_started(plan: JobPlan, own_slots: Sequence[Slot], started: Sequence[int], service: TaskService) -> Outcome:
    """Return the outcome of a job whose ranks did not all start; other reports take precedence over this host's."""
    ended = service.orted_ended()
    if ended is not None:
        report = FailureReport(own_slots[0].world.rank, own_slots[0].offer.host, orted_failure(*ended))
    else:
        report = missing_ranks(own_slots, started)
    patience = 0.0 if ended is None and len(started) < len(own_slots) else _DRIVER_SECONDS
    return _end_job(plan, report, patience)


def missing_ranks(own_slots: Sequence[Slot], started: Sequence[int]) -> FailureReport:
    """Return the report of a host if its own ranks, or the ranks of other hosts, did not start in time.

    Args:
        own_slots: the slots of this host.
        started: the ranks that ``mpirun`` started here.
    """
    host = own_slots[0].offer.host
    if len(started) == len(own_slots):
        cause = f"Not all ranks started in time: mpirun started the ranks of host {host}, but not of all other hosts."
        return FailureReport(-1, "", cause, kind=LAUNCH)
    first_missing = next(slot.world.rank for slot in own_slots if slot.world.rank not in started)
    number = (
        f"{len(started)} of the {counted(len(own_slots), 'rank')} of this host" if started else "no ranks on this host"
    )
    return FailureReport(first_missing, host, f"did not start in time: mpirun started {number}")


def _end_job(plan: JobPlan, report: FailureReport, patience: float = 0.0) -> Outcome:
    """Publish ``report`` as the outcome unless another one arrives within ``patience`` seconds; return the outcome."""
    with plan.connect(Deadline.after(NOTE_SECONDS)) as client:
        try:
            return _outcome(client.get(OUTCOME, Deadline.after(patience)))
        except DeadlineExceededError:
            client.set(OUTCOME, report.to_json(), Deadline.after(NOTE_SECONDS))
            return _outcome(client.get(OUTCOME, Deadline.after(NOTE_SECONDS)))


def _outcome(content: bytes) -> Outcome:
    return Outcome(FailureReport.from_json(content) if content else None)


def _await_job_end(plan: JobPlan, task: TaskInfo, deadline: Deadline) -> None:
    """Wait for the outcome of the job while another task of this host supervises the ranks."""
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    slot = next(candidate for candidate in plan.slots if candidate.offer.task_index == task.index)
    with _watching(plan, events) as client:
        await_outcome(events, Supervision(slot.world.rank, slot.offer.host, client, deadline, parent=task.parent))


def run_mpi_task(job: MpiJob, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Take part in a job; yield rows of ``RESULT_SCHEMA`` for the ranks that this task supervised."""
    for _ in batches:  # Spark requires that the task reads its input
        continue
    contents = serve(job, current_task_info())
    for rank, content in sorted(contents.items()):
        yield from result_rows(rank, content)
