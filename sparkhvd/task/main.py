"""The function that runs in every Spark task of a job."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict

import pyarrow as pa

from sparkhvd._util.addresses import address_to_bind
from sparkhvd.comm.connect.rendezvous import RendezvousServer
from sparkhvd.config import given_rows_variable, local_folders, yarn_container
from sparkhvd.data.prepare.stats import SPLIT
from sparkhvd.data.read.spool import Spool
from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError, StoreError
from sparkhvd.rpc.fields import from_json_fields
from sparkhvd.rpc.interfaces import candidates
from sparkhvd.rpc.protection import require_encryption
from sparkhvd.rpc.registration import Introduction, TaskOffer
from sparkhvd.task.all_gather import all_gather
from sparkhvd.task.assignment import assign
from sparkhvd.task.devices import mixed_devices, write_device_map
from sparkhvd.task.driver_connection import DriverConnection, DriverEndedError
from sparkhvd.task.failure_report import LAUNCH, FailureReport
from sparkhvd.task.host.host_hash import host_hash
from sparkhvd.task.host.versions import different_versions, local_versions
from sparkhvd.task.job import Job
from sparkhvd.task.rank import JobPlan, await_rows, supervise_rank, worker_spec
from sparkhvd.task.result_rows import result_rows
from sparkhvd.task.supervision import Outcome
from sparkhvd.task.task_info import TaskInfo, current_task_info
from sparkhvd.task.worker.output import DriverLog
from sparkhvd.task.worker.process import WorkerProcess, spawn_or_substitute
from sparkhvd.task.worker.spec import Raised
from sparkhvd.task.worker.threads import thread_defaults

logger = logging.getLogger(__name__)


def run_task(job: Job, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run one rank and yield rows of ``RESULT_SCHEMA``.

    A failing rank yields a row. An exception means that infrastructure was lost, and makes Spark retry the stage.
    Without a driver, there are no rows and no exception.
    """
    try:
        rank, content = _run_rank(job, batches)
    except DriverEndedError as error:
        logger.warning("%s", error)
        return
    yield from result_rows(rank, content)


def _run_rank(job: Job, batches: Iterator[pa.RecordBatch]) -> tuple[int, bytes | Outcome]:
    """Run one rank; return its number, and its pickled result or the outcome of a job that failed."""
    with ExitStack() as stack:
        log = DriverLog(job)
        stack.callback(log.close)
        task = current_task_info()
        if job.config.encrypt:
            require_encryption(task.host)
        driver = stack.enter_context(closing(DriverConnection(job, task))) if job.driver_connection else None
        defaults = thread_defaults(task.cpus)
        spawned, start_problem = spawn_or_substitute(
            dict(job.env), defaults, job.preload, job.executable, job.config.warm_seconds
        )
        worker = WorkerProcess(spawned, log)
        stack.callback(worker.close)
        # An executor's JVM may exit when a stage is cancelled while a task waits in Spark's all-gather. Therefore no
        # task may wait there for another task's rows: without the driver, introductions are exchanged before the rows
        # are read.
        gathers_first = job.has_rows and (driver is None or not driver.is_open())
        rows = None if gathers_first else _spool_rows(job, batches, stack)
        plan, nics_problem, used_spark = _gather(job, task, driver, stack)
        slot = next(candidate for candidate in plan.slots if candidate.offer.task_index == task.index)
        log.rank = slot.world.rank
        if slot.world.rank == 0:
            log.started()
        paths, rows_problem = _spool_rows(job, batches, stack) if rows is None else rows
        if job.has_rows and used_spark:
            await_rows(plan, slot)
        deadline = Deadline.after(job.start_timeout)  # reading rows may have taken any time
        if driver is not None:
            driver.attend(slot.world.rank, worker.events)
        worker.output.start()
        if slot.world.rank == 0:
            write_device_map(plan.slots, log)
            # Without driver connections, the driver does not receive the offers.
            if driver is None and (warning := different_versions(job.versions, [other.offer for other in plan.slots])):
                log.write("stderr", warning.encode())
        if rows_problem is not None:
            worker.events.put(Raised(str(rows_problem), "", secondary=False))
        elif start_problem:
            worker.events.put(FailureReport(slot.world.rank, slot.offer.host, start_problem))
        elif problem := nics_problem or mixed_devices([other.offer for other in plan.slots], job):
            worker.events.put(FailureReport(slot.world.rank, slot.offer.host, problem, kind=LAUNCH))
        else:
            worker.send(worker_spec(job, plan, slot, given_rows_variable(paths)))
        report_phase = driver.report_phase if driver is not None else lambda _: None
        return slot.world.rank, supervise_rank(plan, slot, worker, deadline, report_phase=report_phase)


def _spool_rows(
    job: Job, batches: Iterator[pa.RecordBatch], stack: ExitStack
) -> tuple[Mapping[str, str], StoreError | None]:
    """Spool the rows of this task; return their files by split, and the error that stopped the spooling, if any."""
    problem: StoreError | None = None
    spool = Spool(local_folders(), by=SPLIT, otherwise="train")
    stack.callback(spool.close)
    for batch in batches:  # Spark requires its input to be read, even after an error
        if job.has_rows and problem is None:
            try:
                spool.write(batch)
            except StoreError as error:
                problem = error
    try:
        return spool.finish(), problem
    except StoreError as error:
        return {}, problem or error


def _gather(job: Job, task: TaskInfo, driver: DriverConnection | None, stack: ExitStack) -> tuple[JobPlan, str, bool]:
    """Exchange introductions among the tasks; task 0 serves the rendezvous.

    Returns:
        The plan; the problem with the job's ``nics`` on this host, empty when there is none; and whether the tasks used
        Spark's all-gather, which does not wait for rows.
    """
    bind_host, nics_problem = address_to_bind(task.host, task.hosts), ""
    if job.nics:
        try:
            bind_host = candidates(job.nics, task.host, task.hosts)[0].address
        except LaunchError as error:  # a retry by Spark would fail the same way
            nics_problem = str(error)
    port = 0
    if task.index == 0:
        server = RendezvousServer(_token(job, task.attempt), bind_host, encrypt=job.config.encrypt)
        stack.callback(server.close)
        port = server.port
    offer = TaskOffer(
        task.index,
        host_hash(),
        task.host,
        bind_host,
        task.devices,
        task.device_kind,
        local_versions(job.versions),
        yarn_container(),
    )
    introduction = Introduction(task.attempt, offer, port)
    introductions = driver.exchange_introductions(introduction) if driver is not None else None
    used_spark = introductions is None
    if introductions is None:
        messages = all_gather(json.dumps(asdict(introduction)), job, task)
        introductions = tuple(from_json_fields(Introduction, json.loads(message)) for message in messages)
    first_introduction = next(other for other in introductions if other.offer.task_index == 0)
    rendezvous = (first_introduction.offer.bind_host, first_introduction.port)
    slots = assign([other.offer for other in introductions])
    plan = JobPlan(tuple(slots), (rendezvous,), _token(job, first_introduction.attempt), job.config.encrypt)
    return plan, nics_problem, used_spark


def _token(job: Job, attempt: int) -> bytes:
    """Return the secret of the ranks, derived from the job's secret and task 0's attempt id, so it is never sent."""
    return hmac.digest(job.secret, f"ranks of attempt {attempt}".encode(), hashlib.sha256)
