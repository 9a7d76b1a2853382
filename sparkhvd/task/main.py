"""The function that runs in every Spark task of a job."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

import pyarrow as pa
from pyspark import BarrierTaskContext

from sparkhvd.comm.launch_context import LaunchContext
from sparkhvd.comm.rendezvous import RendezvousClient, RendezvousServer
from sparkhvd.deadline import Deadline
from sparkhvd.rpc.addresses import address_to_bind
from sparkhvd.task.assignment import Slot, TaskOffer, assign
from sparkhvd.task.host_hash import host_hash
from sparkhvd.task.job import CHUNK_BYTES, FAILURE, RESULT, RESULT_CAP_BYTES, Job
from sparkhvd.task.output import DriverLog
from sparkhvd.task.process import WorkerProcess
from sparkhvd.task.supervise import (
    NOTE_SECONDS,
    Outcome,
    Supervision,
    await_outcome,
    conclude,
    finished_key,
    left_key,
    supervise,
    wait_for_leave,
    watch_outcome,
)
from sparkhvd.task.worker_spec import WorkerSpec
from sparkhvd.world import World


@dataclass(frozen=True)
class Gathered:
    """What all tasks know of each other after the barrier."""

    slots: list[Slot]
    rendezvous: tuple[str, int]
    token: bytes = field(repr=False)


def run_task(job: Job, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run one rank; yields rows of ``RESULT_SCHEMA``.

    A failing rank is a row. Only lost infrastructure raises: Spark then runs the whole stage again.
    """
    for _ in batches:  # Spark wants its input read
        continue
    deadline = Deadline.after(job.start_timeout)
    context = BarrierTaskContext.get()
    with ExitStack() as stack:
        log = DriverLog(job)
        stack.callback(log.close)
        defaults = {"OMP_NUM_THREADS": str(context.cpus())}
        worker = WorkerProcess(dict(job.env), defaults, job.preload, log)
        stack.callback(worker.close)
        gathered = _gather(context, stack)
        slot = next(one for one in gathered.slots if one.offer.task_index == context.partitionId())
        log.rank = slot.world.rank
        worker.output.start()
        if slot.world.rank == 0:
            log.started()
        worker.send(_spec(job, gathered, slot))
        content = _accompany(gathered, slot, worker, deadline)
    yield from _rows(slot.world.rank, content)


def _gather(context: BarrierTaskContext, stack: ExitStack) -> Gathered:
    """Exchange what the tasks know; task 0 serves the rendezvous and makes the job's secret."""
    index = context.partitionId()
    hosts = [_host_of(info.address) for info in context.getTaskInfos()]
    bind_host = address_to_bind(hosts[index], hosts)
    own: dict[str, object] = asdict(TaskOffer(index, host_hash(), hosts[index], bind_host))
    if index == 0:
        token = secrets.token_bytes(32)
        server = RendezvousServer(token, bind_host)
        stack.callback(server.close)
        own |= {"port": server.port, "token": token.hex()}
    messages = [json.loads(message) for message in context.allGather(json.dumps(own))]
    first = next(message for message in messages if message["task_index"] == 0)
    rendezvous = (first["bind_host"], first.pop("port"))
    token = bytes.fromhex(first.pop("token"))
    return Gathered(assign([TaskOffer(**message) for message in messages]), rendezvous, token)


def _accompany(gathered: Gathered, slot: Slot, worker: WorkerProcess, deadline: Deadline) -> bytes | Outcome:
    """Watch the worker, then agree with the other tasks on the outcome of the job."""
    rank, size = slot.world.rank, slot.world.size
    # One connection waits for the outcome all the time, the other one speaks.
    with (
        RendezvousClient([gathered.rendezvous], gathered.token, deadline) as listening,
        RendezvousClient([gathered.rendezvous], gathered.token, deadline) as client,
    ):
        watcher = watch_outcome(listening, worker.events)
        try:
            supervision = Supervision(rank, slot.offer.host, client, deadline)
            ended = supervise(worker, supervision)
            length = len(ended) if isinstance(ended, bytes) else 0
            client.set(finished_key(rank), str(length).encode(), Deadline.after(NOTE_SECONDS))
            if rank == 0:
                conclude(client, [one.offer.host for one in gathered.slots], RESULT_CAP_BYTES)
            outcome = ended if isinstance(ended, Outcome) else await_outcome(worker, supervision)
            client.set(left_key(rank), b"", Deadline.after(NOTE_SECONDS))
            if rank == 0:
                wait_for_leave(client, size)
        finally:
            listening.close()
            watcher.join()
    return ended if outcome.failure is None else outcome


def _spec(job: Job, gathered: Gathered, slot: Slot) -> WorkerSpec:
    context = LaunchContext(
        world=slot.world,
        rendezvous=(gathered.rendezvous,) if slot.world.size > 1 else (),
        token=gathered.token,
        host_key=slot.offer.host_hash,
        bind_host=slot.offer.bind_host,
        config=job.config,
    )
    return WorkerSpec(context, job.payload, _variables(slot.world, job.log_level))


def _variables(world: World, log_level: int) -> tuple[tuple[str, str], ...]:
    """What a rank's environment says about its place, for scripts and libraries that look there."""
    places = {f"SPARKHVD_{name.upper()}": str(value) for name, value in asdict(world).items()}
    places |= {"LOCAL_RANK": str(world.local_rank), "SPARKHVD_LOG_LEVEL": str(log_level)}
    return tuple(places.items())


def _rows(rank: int, content: bytes | Outcome) -> Iterator[pa.RecordBatch]:
    if isinstance(content, bytes):
        for chunk, start in enumerate(range(0, max(len(content), 1), CHUNK_BYTES)):
            yield _row(rank, RESULT, chunk, content[start : start + CHUNK_BYTES])
    elif content.failure is not None and content.failure.rank == rank:
        yield _row(rank, FAILURE, 0, content.failure.to_json())


def _row(rank: int, kind: str, chunk: int, content: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "rank": pa.array([rank], pa.int32()),
            "kind": pa.array([kind], pa.string()),
            "chunk": pa.array([chunk], pa.int32()),
            "content": pa.array([content], pa.binary()),
        }
    )


def _host_of(address: str) -> str:
    """``host`` of ``host:port``; an IPv6 host stands in brackets."""
    host = address.rpartition(":")[0] or address
    return host.strip("[]")
