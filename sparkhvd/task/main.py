"""The function that runs in every Spark task of a job."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict

import pyarrow as pa
from pyspark import BarrierTaskContext

from sparkhvd.addresses import address_to_bind
from sparkhvd.comm.rendezvous import RendezvousServer
from sparkhvd.deadline import Deadline
from sparkhvd.rpc.interfaces import candidates
from sparkhvd.task.assignment import TaskOffer, assign
from sparkhvd.task.host_hash import host_hash
from sparkhvd.task.job import CHUNK_BYTES, FAILURE, RESULT, Job
from sparkhvd.task.output import DriverLog
from sparkhvd.task.process import WorkerProcess, spawn_worker
from sparkhvd.task.rank import Plan, accompany, worker_spec
from sparkhvd.task.supervise import Outcome
from sparkhvd.task.threads import thread_defaults


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
        defaults = thread_defaults(context.cpus())
        worker = WorkerProcess(spawn_worker(dict(job.env), defaults, job.preload, job.executable), log)
        stack.callback(worker.close)
        plan = _gather(context, job.nics, stack)
        slot = next(one for one in plan.slots if one.offer.task_index == context.partitionId())
        log.rank = slot.world.rank
        worker.output.start()
        if slot.world.rank == 0:
            log.started()
        worker.send(worker_spec(job, plan, slot))
        content = accompany(plan, slot, worker, deadline)
    yield from result_rows(slot.world.rank, content)


def _gather(context: BarrierTaskContext, nics: tuple[str, ...], stack: ExitStack) -> Plan:
    """Exchange what the tasks know; task 0 serves the rendezvous and makes the job's secret."""
    index = context.partitionId()
    hosts = [host_of(info.address) for info in context.getTaskInfos()]
    bind_host = candidates(nics, hosts[index], hosts)[0].address if nics else address_to_bind(hosts[index], hosts)
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
    return Plan(tuple(assign([TaskOffer(**message) for message in messages])), rendezvous, token)


def result_rows(rank: int, content: bytes | Outcome) -> Iterator[pa.RecordBatch]:
    """The rows that say what a rank came to: its result in chunks, or its failure; none when another rank failed."""
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


def host_of(address: str) -> str:
    """``host`` of ``host:port``; an IPv6 host stands in brackets."""
    host = address.rpartition(":")[0] or address
    return host.strip("[]")
