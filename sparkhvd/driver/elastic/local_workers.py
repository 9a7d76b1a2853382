"""Workers of an elastic job on this machine."""

from __future__ import annotations

import logging
import os
import queue
import socket
from collections.abc import Mapping

from sparkhvd._util.addresses import LOOPBACK
from sparkhvd.comm.connect.launch_context import MembershipAddress
from sparkhvd.driver.elastic.workers import Event, WorkerStarting
from sparkhvd.driver.host_process import is_this_machine
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.task.elastic.worker import RunningWorkers, WorkerLocation
from sparkhvd.task.host.host_hash import host_hash
from sparkhvd.task.job import Job
from sparkhvd.task.worker.output import HandlerLog

logger = logging.getLogger(__name__)

_END_SECONDS = 20.0


class LocalWorkers:
    """Starts workers on this machine.

    Args:
        job: the job of the workers; ``num_proc`` is the number of ranks that share the cores.
        membership: the address of the membership server, without a worker's number.
        stream: receives the workers' output.
        inbox: receives the locations and the ends of the workers.
    """

    def __init__(
        self,
        job: Job,
        membership: MembershipAddress,
        stream: LogStream,
        inbox: queue.SimpleQueue[Event],
    ) -> None:
        self._inbox = inbox
        cpus = max(1, len(os.sched_getaffinity(0)) // job.num_proc)
        self._workers = RunningWorkers(
            job, membership, cpus, lambda: HandlerLog(stream.handle, job.num_proc), inbox.put
        )

    def note_offer(self, capacity: Mapping[str, int]) -> dict[str, str]:
        """Return the offered hosts on which no worker can run, with the reason for each."""
        remote_hosts = [host for host in capacity if not is_this_machine(host)]
        return {
            host: f"{host} is not this machine; launcher='ssh' starts ranks on other machines" for host in remote_hosts
        }

    def start(self, worker: int, host: str) -> None:
        """Start a worker: report ``WorkerStarting``, then ``Lost`` if it does not start."""
        location = WorkerLocation(host_hash(), host, LOOPBACK)
        self._inbox.put(WorkerStarting(worker, location))
        self._workers.start(worker, location)

    def assign(self, worker: int, rank: int) -> None:
        """Note the rank of a worker in a new generation."""
        self._workers.set_rank(worker, rank)

    def stop(self, worker: int) -> None:
        """Begin to end a worker, without waiting for its end."""
        self._workers.stop(worker)

    def close(self) -> None:
        """End all workers and wait for their ends."""
        for number in self._workers.close(_END_SECONDS):
            logger.warning("Worker %d of this job did not end within %g s.", number, _END_SECONDS)


def own_host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()
