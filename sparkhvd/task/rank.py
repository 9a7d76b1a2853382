"""One rank of a job, from its spec to its result, for every launcher."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousClient
from sparkhvd.config import changed_environment
from sparkhvd.deadline import Deadline
from sparkhvd.task.assignment import Slot
from sparkhvd.task.devices import device_variables, drop_user_variables
from sparkhvd.task.job import RESULT_CAP_BYTES, Job
from sparkhvd.task.supervision import (
    JOB_SECONDS,
    NOTE_SECONDS,
    Outcome,
    Supervision,
    await_outcome,
    finished_key,
    left_key,
    publish_outcome,
    supervise,
    wait_for_leave,
    watch_outcome,
)
from sparkhvd.task.worker.import_path import IMPORT_PATH
from sparkhvd.task.worker.process import WorkerProcess
from sparkhvd.task.worker.spec import WorkerSpec


@dataclass(frozen=True)
class JobPlan:
    """The assignment of ranks and the rendezvous of a job, equal on all hosts.

    Attributes:
        slots: one per rank, in rank order.
        rendezvous: the addresses of the rendezvous, which ranks and tasks try in order.
        token: the secret of the rendezvous.
        encrypt: whether the rendezvous must be encrypted.
    """

    slots: tuple[Slot, ...]
    rendezvous: tuple[tuple[str, int], ...]
    token: bytes = field(repr=False)
    encrypt: bool = False

    def connect(self, deadline: Deadline) -> RendezvousClient:
        """Connect to the rendezvous.

        Raises:
            SparkHvdError: no address answers in time, or the server belongs to another job.
        """
        return RendezvousClient(self.rendezvous, self.token, deadline, encrypt=self.encrypt)


def worker_spec(job: Job, plan: JobPlan, slot: Slot, row_variables: tuple[tuple[str, str], ...] = ()) -> WorkerSpec:
    """Return the spec for the worker of a slot; ``row_variables`` point to the rows of its task."""
    context = LaunchContext(
        world=slot.world,
        rendezvous=plan.rendezvous if slot.world.size > 1 else (),
        token=plan.token,
        host_key=slot.offer.host_hash,
        bind_host=slot.offer.bind_host,
        config=replace(job.config, network_interfaces=",".join(job.nics)) if job.nics else job.config,
    )
    path = changed_environment(dict(job.env)).get(IMPORT_PATH)
    return WorkerSpec(context, job.payload, (*_variables(job, plan, slot), *row_variables), path)


def await_rows(plan: JobPlan, slot: Slot) -> None:
    """Wait without limit until all tasks have their rows. Each task calls this function once it has its own rows.

    Raises:
        SparkHvdError: infrastructure was lost.
    """
    size, forever = slot.world.size, Deadline.after(JOB_SECONDS)
    with plan.connect(Deadline.after(NOTE_SECONDS)) as client:
        client.set(f"rows/{slot.world.rank}", b"", Deadline.after(NOTE_SECONDS))
        if slot.world.rank == 0:
            for rank in range(size):
                client.get(f"rows/{rank}", forever)
            client.set("rows", b"", Deadline.after(NOTE_SECONDS))
        client.get("rows", forever)


def supervise_rank(
    plan: JobPlan,
    slot: Slot,
    worker: WorkerProcess,
    deadline: Deadline,
    *,
    parent: int | None = None,
    report_phase: Callable[[str], None] = lambda _: None,
) -> bytes | Outcome:
    """Supervise the worker of a slot, then agree with the other ranks on the outcome of the job.

    Args:
        plan: the plan of the job.
        slot: the slot of the rank.
        worker: the worker, which has its spec unless a failure is among its events. When this function returns, the
            worker has ended.
        deadline: the time by which the worker must be ready for ``fn``.
        parent: the process that this one must not outlive; None means the current parent, 0 means no process.
        report_phase: called with every new phase of the rank; must not block.

    Returns:
        The pickled result, or the outcome of a job that failed.

    Raises:
        LaunchError: infrastructure was lost.
    """
    rank, size = slot.world.rank, slot.world.size
    hosts = [other.offer.host for other in plan.slots]
    # Connecting has its own time limit, because the server already runs, and ``deadline`` is for the worker and may be
    # close.
    with plan.connect(Deadline.after(NOTE_SECONDS)) as client:
        watcher = watch_outcome(client, worker.events)
        try:
            own_parent = os.getppid() if parent is None else parent
            supervision = Supervision(rank, slot.offer.host, client, deadline, hosts, own_parent, report_phase)
            ended = supervise(worker, supervision)
            length = len(ended) if isinstance(ended, bytes) else 0
            client.set(finished_key(rank), str(length).encode(), Deadline.after(NOTE_SECONDS))
            if rank == 0:
                publish_outcome(client, hosts, RESULT_CAP_BYTES)
            outcome = ended if isinstance(ended, Outcome) else await_outcome(worker.events, supervision)
            client.set(left_key(rank), b"", Deadline.after(NOTE_SECONDS))
            if rank == 0:
                wait_for_leave(client, size)
        finally:
            client.close()
            watcher.join()
    return ended if outcome.failure is None else outcome


def _variables(job: Job, plan: JobPlan, slot: Slot) -> tuple[tuple[str, str], ...]:
    """Return the environment variables that describe a rank, for scripts and libraries that read them."""
    world = slot.world
    # Scripts written for Horovod read Horovod's names.
    world_variables = {
        f"{prefix}_{name.upper()}": str(value)
        for prefix in ("SPARKHVD", "HOROVOD")
        for name, value in asdict(world).items()
    }
    world_variables |= {"LOCAL_RANK": str(world.local_rank), "SPARKHVD_LOG_LEVEL": str(job.log_level)}
    return (*world_variables.items(), *drop_user_variables(device_variables(plan.slots, slot), job.env))
