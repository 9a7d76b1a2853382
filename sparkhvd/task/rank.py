"""One rank of a job, from its spec to its result, whoever started its worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousClient
from sparkhvd.config import changed_environment
from sparkhvd.deadline import Deadline
from sparkhvd.task.assignment import Slot
from sparkhvd.task.devices import ORDER, VISIBLE, device_variables
from sparkhvd.task.job import RESULT_CAP_BYTES, Job
from sparkhvd.task.supervision import (
    JOB_SECONDS,
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
from sparkhvd.task.worker.import_path import IMPORT_PATH
from sparkhvd.task.worker.process import WorkerProcess
from sparkhvd.task.worker.spec import WorkerSpec


@dataclass(frozen=True)
class JobPlan:
    """Who runs what in a job: the same on all its hosts.

    Attributes:
        slots: one per rank, in rank order.
        rendezvous: where the ranks and those who watch over them meet; tried in order.
        token: the job's secret.
        encrypt: whether they insist on encryption there.
    """

    slots: tuple[Slot, ...]
    rendezvous: tuple[tuple[str, int], ...]
    token: bytes = field(repr=False)
    encrypt: bool = False

    def connect(self, deadline: Deadline) -> RendezvousClient:
        """Connect to the rendezvous.

        Raises:
            SparkHvdError: no address answers in time, or what answers is not this job's.
        """
        return RendezvousClient(self.rendezvous, self.token, deadline, encrypt=self.encrypt)


def worker_spec(job: Job, plan: JobPlan, slot: Slot, given: tuple[tuple[str, str], ...] = ()) -> WorkerSpec:
    """What the worker of a slot is told; ``given`` are variables that say what its task has for it."""
    context = LaunchContext(
        world=slot.world,
        rendezvous=plan.rendezvous if slot.world.size > 1 else (),
        token=plan.token,
        host_key=slot.offer.host_hash,
        bind_host=slot.offer.bind_host,
        config=replace(job.config, network_interfaces=",".join(job.nics)) if job.nics else job.config,
    )
    path = changed_environment(dict(job.env)).get(IMPORT_PATH)
    return WorkerSpec(context, job.payload, (*_variables(job, plan, slot), *given), path)


def await_rows(plan: JobPlan, slot: Slot) -> None:
    """Wait, however long it takes, until all tasks have their rows; called by each of them that has its own.

    Raises:
        SparkHvdError: infrastructure was lost.
    """
    size, whole = slot.world.size, Deadline.after(JOB_SECONDS)
    with plan.connect(Deadline.after(NOTE_SECONDS)) as client:
        client.set(f"rows/{slot.world.rank}", b"", Deadline.after(NOTE_SECONDS))
        if slot.world.rank == 0:
            for rank in range(size):
                client.get(f"rows/{rank}", whole)
            client.set("rows", b"", Deadline.after(NOTE_SECONDS))
        client.get("rows", whole)


def supervise_rank(
    plan: JobPlan,
    slot: Slot,
    worker: WorkerProcess,
    deadline: Deadline,
    *,
    parent: int | None = None,
    reach: Callable[[str], None] = lambda _: None,
) -> bytes | Outcome:
    """Watch the worker of a slot, then agree with those of the other ranks on the outcome of the job.

    Args:
        plan: who runs what.
        slot: the rank and its place.
        worker: has got its spec; it has ended afterwards.
        deadline: when it has to be ready for ``fn``.
        parent: the process that this one must not outlive; None is the one that started it, 0 is none.
        reach: told how far the rank is, whenever that changes; must not block.

    Returns:
        The pickled result, or the outcome that made it worthless.

    Raises:
        LaunchError: infrastructure was lost.
    """
    rank, size = slot.world.rank, slot.world.size
    hosts = [one.offer.host for one in plan.slots]
    # One connection waits for the outcome all the time, the other one speaks. The server is there already: what bounds
    # the connecting is the network, and ``deadline`` is for the worker, however little of it is left.
    connecting = Deadline.after(NOTE_SECONDS)
    with plan.connect(connecting) as listening, plan.connect(connecting) as client:
        watcher = watch_outcome(listening, worker.events)
        try:
            own_parent = os.getppid() if parent is None else parent
            supervision = Supervision(rank, slot.offer.host, client, deadline, hosts, own_parent, reach)
            ended = supervise(worker, supervision)
            length = len(ended) if isinstance(ended, bytes) else 0
            client.set(finished_key(rank), str(length).encode(), Deadline.after(NOTE_SECONDS))
            if rank == 0:
                conclude(client, hosts, RESULT_CAP_BYTES)
            outcome = ended if isinstance(ended, Outcome) else await_outcome(worker.events, supervision)
            client.set(left_key(rank), b"", Deadline.after(NOTE_SECONDS))
            if rank == 0:
                wait_for_leave(client, size)
        finally:
            listening.close()
            watcher.join()
    return ended if outcome.failure is None else outcome


def _variables(job: Job, plan: JobPlan, slot: Slot) -> tuple[tuple[str, str], ...]:
    """What a rank's environment says about its place, for scripts and libraries that look there."""
    world = slot.world
    # Scripts that were written for Horovod look under its names.
    places = {
        f"{owner}_{name.upper()}": str(value)
        for owner in ("SPARKHVD", "HOROVOD")
        for name, value in asdict(world).items()
    }
    places |= {"LOCAL_RANK": str(world.local_rank), "SPARKHVD_LOG_LEVEL": str(job.log_level)}
    set_by_user = {name for name, _ in job.env}
    if VISIBLE in set_by_user:
        set_by_user.add(ORDER)  # the user counted
    devices = [(name, value) for name, value in device_variables(plan.slots, slot) if name not in set_by_user]
    return (*places.items(), *devices)
