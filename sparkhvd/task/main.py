"""The function that runs in every Spark task of a job."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict

import pyarrow as pa
from pyspark import BarrierTaskContext

from sparkhvd.addresses import address_to_bind
from sparkhvd.comm.rendezvous import RendezvousServer
from sparkhvd.config import given_rows_variable, local_folders
from sparkhvd.data.facts import SPLIT
from sparkhvd.data.spool import Spool
from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError, StoreError
from sparkhvd.rpc.fields import built
from sparkhvd.rpc.interfaces import candidates
from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.task.assignment import assign
from sparkhvd.task.devices import mixed_devices, write_device_map
from sparkhvd.task.host_hash import host_hash
from sparkhvd.task.job import Job
from sparkhvd.task.lease import DriverLease
from sparkhvd.task.output import DriverLog
from sparkhvd.task.place import TaskPlace, place_of_task
from sparkhvd.task.process import WorkerProcess, spawn_or_substitute
from sparkhvd.task.rank import Plan, accompany, worker_spec
from sparkhvd.task.report import LAUNCH, FailureReport
from sparkhvd.task.rows import result_rows
from sparkhvd.task.threads import thread_defaults
from sparkhvd.task.worker_spec import Raised


def run_task(job: Job, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run one rank; yields rows of ``RESULT_SCHEMA``.

    A failing rank is a row. Only lost infrastructure raises: Spark then runs the whole stage again.
    """
    context = BarrierTaskContext.get()
    with ExitStack() as stack:
        log = DriverLog(job)
        stack.callback(log.close)
        place = place_of_task()
        log.attend(place.index, place.host)
        defaults = thread_defaults(place.cpus)
        spawned, unstarted = spawn_or_substitute(dict(job.env), defaults, job.preload, job.executable)
        worker = WorkerProcess(spawned, log)
        stack.callback(worker.close)
        paths, problem = _received(job, batches, stack)
        deadline = Deadline.after(job.start_timeout)  # the rows may have taken any time
        plan, unknown = _gather(context, place, job.nics, stack)
        slot = next(one for one in plan.slots if one.offer.task_index == place.index)
        log.rank = slot.world.rank
        log.attend(place.index, place.host)
        worker.output.start()
        if job.driver_lease:
            stack.enter_context(closing(DriverLease(job, worker.events)))
        if slot.world.rank == 0:
            log.started()
            write_device_map(plan.slots, log)
        if problem is not None:
            worker.events.put(Raised(str(problem), "", secondary=False))
        elif unstarted:
            worker.events.put(FailureReport(slot.world.rank, slot.offer.host, unstarted))
        elif refused := unknown or mixed_devices([one.offer for one in plan.slots], job):
            worker.events.put(FailureReport(slot.world.rank, slot.offer.host, refused, kind=LAUNCH))
        else:
            worker.send(worker_spec(job, plan, slot, given_rows_variable(paths)))
        content = accompany(plan, slot, worker, deadline)
    yield from result_rows(slot.world.rank, content)


def _received(
    job: Job, batches: Iterator[pa.RecordBatch], stack: ExitStack
) -> tuple[Mapping[str, str], StoreError | None]:
    """Where the rows of this task lie, for its rank; or what kept them from it."""
    problem: StoreError | None = None
    spool = Spool(local_folders(), by=SPLIT, otherwise="train")
    stack.callback(spool.close)
    for batch in batches:  # Spark wants its input read, whatever comes of it
        if job.gives_rows and problem is None:
            try:
                spool.write(batch)
            except StoreError as error:
                problem = error
    try:
        return spool.finish(), problem
    except StoreError as error:
        return {}, problem or error


def _gather(context: BarrierTaskContext, place: TaskPlace, nics: tuple[str, ...], stack: ExitStack) -> tuple[Plan, str]:
    """Exchange what the tasks know; task 0 serves the rendezvous and makes the job's secret.

    Returns:
        The plan, and what is wrong with ``nics`` on this host, empty when nothing is.
    """
    bind_host, unknown = address_to_bind(place.host, place.hosts), ""
    if nics:
        try:
            bind_host = candidates(nics, place.host, place.hosts)[0].address
        except LaunchError as error:  # no reason for Spark to try again
            unknown = str(error)
    offer = TaskOffer(place.index, host_hash(), place.host, bind_host, place.devices, place.device_kind)
    own: dict[str, object] = asdict(offer)
    if place.index == 0:
        token = secrets.token_bytes(32)
        server = RendezvousServer(token, bind_host)
        stack.callback(server.close)
        own |= {"port": server.port, "token": token.hex()}
    messages = [json.loads(message) for message in context.allGather(json.dumps(own))]
    first = next(message for message in messages if message["task_index"] == 0)
    rendezvous = (first["bind_host"], first.pop("port"))
    token = bytes.fromhex(first.pop("token"))
    return Plan(tuple(assign([built(TaskOffer, message) for message in messages])), (rendezvous,), token), unknown
