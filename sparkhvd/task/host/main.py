"""The ranks of one host without Spark: ``python -m sparkhvd.task.host.main``.

The launcher starts this process through ssh, through Slurm or directly. The process ends its ranks and itself when its
stdin is closed, which happens when the launcher ends or the connection is lost.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import ExitStack

from sparkhvd._util.addresses import address_to_bind, is_loopback, outgoing_address
from sparkhvd.comm.connect.rendezvous import RendezvousServer
from sparkhvd.deadline import Deadline
from sparkhvd.errors import SparkHvdError
from sparkhvd.rpc.interfaces import candidates
from sparkhvd.rpc.protection import require_encryption
from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.task.host.host_hash import host_hash
from sparkhvd.task.host.launcher_connection import LauncherConnection, apply_setup
from sparkhvd.task.host.messages import HostDone, HostJob, HostLost, HostReady
from sparkhvd.task.host.ranks import run_ranks
from sparkhvd.task.host.versions import local_versions
from sparkhvd.task.rank import JobPlan, worker_spec
from sparkhvd.task.supervision import Outcome
from sparkhvd.task.worker.exit import keep_ended_children
from sparkhvd.task.worker.output import HandlerLog
from sparkhvd.task.worker.process import WorkerProcess, spawn_worker
from sparkhvd.task.worker.threads import thread_defaults


def main() -> int:
    """Take part in one job; return 0 once the launcher has received the outcomes of the ranks or the error."""
    keep_ended_children()
    launcher = LauncherConnection()
    job = launcher.receive()
    if not isinstance(job, HostJob):
        raise TypeError(f"The launcher sent {type(job).__name__} instead of a HostJob.")
    apply_setup(job.setup)
    try:
        launcher.send(HostDone(_take_part(job, launcher)))
    except (SparkHvdError, OSError) as error:
        launcher.send(HostLost(str(error)))
    return 0


def _take_part(job: HostJob, launcher: LauncherConnection) -> dict[int, bytes | Outcome]:
    if job.job.config.encrypt:
        require_encryption(job.host)
    deadline = Deadline.after(job.job.start_timeout)
    address = _own_address(job)
    indices = range(job.first_index, job.first_index + job.count)
    with ExitStack() as stack:
        port = 0
        if job.serves_rendezvous:
            server = RendezvousServer(job.token, address, encrypt=job.job.config.encrypt)
            stack.callback(server.close)
            port = server.port
        workers = [_start(job, launcher) for _ in indices]
        for worker, _ in workers:
            stack.callback(worker.close)
        key = host_hash(job.host)
        versions = local_versions(job.job.versions)
        offers = tuple(TaskOffer(index, key, job.host, address, versions=versions) for index in indices)
        launcher.send(HostReady(offers, port))
        plan = launcher.receive()
        if not isinstance(plan, JobPlan):
            raise TypeError(f"The launcher sent {type(plan).__name__} instead of a JobPlan.")
        own_slots = [slot for slot in plan.slots if slot.offer.task_index in indices]
        for slot, (worker, log) in zip(own_slots, workers, strict=True):
            log.rank = slot.world.rank
            worker.output.start()
            worker.send(worker_spec(job.job, plan, slot))
        by_rank = {slot.world.rank: worker for slot, (worker, _) in zip(own_slots, workers, strict=True)}
        threading.Thread(
            target=_watch, args=(launcher, list(by_rank.values())), name="sparkhvd-launcher", daemon=True
        ).start()
        return run_ranks(plan, by_rank, deadline, parent=0)


def _start(job: HostJob, launcher: LauncherConnection) -> tuple[WorkerProcess, HandlerLog]:
    log = HandlerLog(launcher.send, len(job.hosts))
    defaults = thread_defaults(max(1, len(os.sched_getaffinity(0)) // job.count))
    spawned = spawn_worker(dict(job.job.env), defaults, job.job.preload, job.job.executable)
    return WorkerProcess(spawned, log), log


def _own_address(job: HostJob) -> str:
    """Return the address at which the other hosts reach this one."""
    if job.job.nics:
        return candidates(job.job.nics, job.host, job.hosts)[0].address
    others = [host for host in job.hosts if not is_loopback(host)]
    if is_loopback(job.host) and others:
        return outgoing_address(others[0])
    return address_to_bind(job.host, job.hosts)


def _watch(launcher: LauncherConnection, workers: list[WorkerProcess]) -> None:
    try:
        launcher.receive()  # blocks until the launcher ends, because the launcher sends nothing more
    except (EOFError, OSError):
        for worker in workers:
            worker.terminate(1.0)
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
