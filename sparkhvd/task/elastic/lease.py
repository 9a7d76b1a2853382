"""A lease of an elastic job: a Spark task or a Ray actor that offers one slot to the driver.

It runs the workers that the driver starts, one at a time.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import pyarrow as pa

from sparkhvd._util.addresses import LOOPBACK, is_loopback, outgoing_address
from sparkhvd.comm.connect.launch_context import MembershipAddress
from sparkhvd.config import visible_devices
from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError
from sparkhvd.rpc.client import Client, connect
from sparkhvd.rpc.frames import MAX_FRAME_BYTES
from sparkhvd.rpc.interfaces import candidates
from sparkhvd.rpc.messages import (
    EndLease,
    Message,
    NextCommand,
    OfferSlot,
    Rejected,
    TaskStatus,
    WorkerLost,
    WorkerReturned,
)
from sparkhvd.rpc.protection import require_encryption
from sparkhvd.rpc.registration import Introduction, TaskOffer
from sparkhvd.task.devices import cuda_names, device_kind, drop_user_variables, selection_variables
from sparkhvd.task.elastic.commands import DriverLost, carry_out_commands
from sparkhvd.task.elastic.worker import End, Guard, Lost, RunningWorkers, WorkerLocation, unguarded
from sparkhvd.task.host.host_hash import host_hash
from sparkhvd.task.host.versions import local_versions
from sparkhvd.task.job import Job
from sparkhvd.task.worker.output import DriverLog

logger = logging.getLogger(__name__)

_CHUNK_BYTES = MAX_FRAME_BYTES // 2  # of a result; the rest is for the message's header
_CONNECT_SECONDS = 30.0
_SEND_SECONDS = 60.0
_END_SECONDS = 5.0
# The interval at which a task asks again for a lease that another attempt holds.
_POLL_SECONDS = 2.0
_FOREVER = Deadline(math.inf)  # a suspended driver may resume; the connection ends if its host dies


def run_lease(
    job: Job, membership: MembershipAddress, lease: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Offer the slot of this task until the driver ends the lease; yield nothing.

    Raises:
        LaunchError: this host cannot take part in the job, or the driver was lost.
    """
    for _ in batches:  # Spark requires its input to be read
        pass
    offer, cpus, attempt = _describe(job, lease)
    hold_lease(job, membership, Introduction(attempt, offer, 0), cpus)
    yield from ()


def hold_lease(
    job: Job, membership: MembershipAddress, introduction: Introduction, cpus: int, guard: Guard = unguarded
) -> None:
    """Offer a slot until the driver ends the lease or this process's parent ends, and run the workers in the slot.

    Args:
        job: the job.
        membership: the address of the membership server, without a worker's number.
        introduction: the slot.
        cpus: the number of cores of a worker.
        guard: see ``RunningWorkers``.

    Raises:
        LaunchError: the driver cannot be reached or was lost.
    """
    offer, attempt = introduction.offer, introduction.attempt
    with ExitStack() as stack:
        parent = os.getppid()
        client = _connect(job, offer.host)
        stack.callback(client.close)
        client.send(TaskStatus(offer.task_index, -1, offer.host, attempt), Deadline.after(_SEND_SECONDS))
        if not _offer_slot(client, introduction, parent):
            return
        variables = _device_variables(job, offer)
        report = partial(_report, client)
        workers = RunningWorkers(job, membership, cpus, partial(DriverLog, job), report, variables, guard)
        commands: queue.SimpleQueue[Message | DriverLost] = queue.SimpleQueue()
        request = NextCommand(offer.task_index, attempt)
        reader = threading.Thread(
            target=_receive, args=(client, request, commands), name="sparkhvd-commands", daemon=True
        )
        reader.start()
        stack.callback(reader.join)
        stack.callback(client.wake)
        stack.callback(workers.close, _END_SECONDS)
        location = WorkerLocation(offer.host_hash, offer.host, offer.bind_host)
        # Only a change of this process's parent shows that the executor has ended.
        if carry_out_commands(workers, location, commands, lambda: os.getppid() != parent) is not None:
            raise LaunchError(f"The task on host {offer.host} lost its connection to the driver. See the driver's log.")


def _describe(job: Job, lease: int) -> tuple[TaskOffer, int, int]:
    """Return the offer of this task, its number of cores and the id of its attempt."""
    from pyspark import TaskContext  # noqa: PLC0415 - only Spark tasks call this function

    context = TaskContext.get()
    if context is None:
        raise LaunchError("A task of an elastic job runs only inside Spark.")
    gpus = context.resources().get("gpu")
    devices = cuda_names(gpus.addresses, visible_devices()) if gpus else ()
    offer = describe_slot(job, lease, socket.gethostname(), host_hash(), devices)
    return offer, context.cpus(), context.taskAttemptId()


def describe_slot(job: Job, lease: int, host: str, host_key: str, devices: Sequence[str]) -> TaskOffer:
    """Return the offer of a slot on this host.

    Args:
        job: the job.
        lease: the number of the lease.
        host: the name of this host.
        host_key: equal for slots whose ranks may share memory.
        devices: the CUDA names of the slot's GPUs.

    Raises:
        LaunchError: this host cannot encrypt.
    """
    driver = job.driver_addresses[0][0]
    if job.config.encrypt:
        require_encryption(host)
    if job.nics:
        bind_host = candidates(job.nics, host, [])[0].address
    else:
        bind_host = LOOPBACK if is_loopback(driver) else outgoing_address(driver)
    kind = device_kind(devices, visible_devices())
    return TaskOffer(lease, host_key, host, bind_host, tuple(devices), kind, local_versions(job.versions))


def _device_variables(job: Job, offer: TaskOffer) -> tuple[tuple[str, str], ...]:
    """Return the variables that let the workers of this task see only its GPUs."""
    devices = offer.devices
    return drop_user_variables(selection_variables(devices, devices), job.env) if devices else ()


def _report(client: Client, end: End) -> None:
    """Send the end of a worker to the driver. The worker's thread calls this function."""
    with suppress(OSError):  # the main thread notices by itself that the driver is lost
        if isinstance(end, Lost):
            client.send(WorkerLost(end.worker, end.failure.to_json()), Deadline.after(_SEND_SECONDS))
            return
        for start in range(0, max(1, len(end.content)), _CHUNK_BYTES):
            chunk = end.content[start : start + _CHUNK_BYTES]
            part = WorkerReturned(end.worker, start + _CHUNK_BYTES >= len(end.content), chunk)
            client.send(part, Deadline.after(_SEND_SECONDS))


def _connect(job: Job, host: str) -> Client:
    try:
        deadline = Deadline.after(_CONNECT_SECONDS)
        return connect(job.driver_addresses, job.secret, deadline, encrypt=job.config.encrypt)
    except OSError as error:
        raise LaunchError(
            f"Host {host} cannot connect to the driver, which elastic jobs need: {error} Check the network between "
            "this host and the driver. On Spark, check spark.driver.host, too."
        ) from error


def _offer_slot(client: Client, introduction: Introduction, parent: int) -> bool:
    """Offer the slot until the driver accepts it, and return True; False if the job or this executor has ended.

    The driver rejects the offer while another attempt of this task holds the lease: a speculative one, or one whose
    executor was just lost.
    """
    waiting = threading.Event()
    while os.getppid() == parent:
        try:
            answer = client.ask(OfferSlot(introduction), _FOREVER)
        except OSError as error:
            raise LaunchError(
                f"The task on host {introduction.offer.host} lost its connection to the driver: {error} See "
                "the driver's log."
            ) from error
        if not isinstance(answer, Rejected):
            return not isinstance(answer, EndLease)
        waiting.wait(_POLL_SECONDS)
    return False


def _receive(client: Client, request: NextCommand, commands: queue.SimpleQueue[Message | DriverLost]) -> None:
    try:
        while True:
            command = client.ask(request, _FOREVER)
            commands.put(command)
            if isinstance(command, EndLease):
                return
    except OSError as error:
        commands.put(DriverLost(str(error)))
