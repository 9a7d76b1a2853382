"""What driver, tasks and ranks of the mpi launcher tell each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from sparkhvd.task.assignment import TaskOffer, assign
from sparkhvd.task.job import Job
from sparkhvd.task.rank import Plan

# Environment of orted, which the ranks inherit: the Python to start, and the way to the task that watches over them.
EXECUTABLE = "SPARKHVD_EXECUTABLE"
RANK_SOCKET = "SPARKHVD_RANK_SOCKET"
RANK_SECRET = "SPARKHVD_RANK_SECRET"  # noqa: S105 - the name of a variable

# What mpirun starts as every rank; the Python is the one of the host where the rank runs.
RANK_COMMAND = ("/bin/sh", "-c", f'exec "${EXECUTABLE}" -m sparkhvd.task.mpi.rank')


@dataclass(frozen=True)
class MpiJob:
    """A job on its way to the tasks of this launcher.

    Attributes:
        job: the job; the driver's service listens where it takes the output.
        rendezvous: where the driver serves the rendezvous.
        token: the secret of the rendezvous.
    """

    job: Job
    rendezvous: tuple[tuple[str, int], ...]
    token: bytes = field(repr=False)


@dataclass(frozen=True)
class TaskServer:
    """Where a task listens on one of its network interfaces."""

    interface: str
    address: str
    port: int
    network: str


@dataclass(frozen=True)
class Registration:
    """What a task tells the driver about itself.

    Attributes:
        attempt: which attempt of the stage it belongs to.
        offer: its place; ``bind_host`` is filled in when the interfaces are known.
        servers: where it listens.
        orted: the path of ``orted``, empty when its host has none.
    """

    attempt: int
    offer: TaskOffer
    servers: tuple[TaskServer, ...]
    orted: str

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Registration:
        fields = json.loads(content)
        return cls(
            fields["attempt"], TaskOffer.from_json(fields["offer"]), servers_from(fields["servers"]), fields["orted"]
        )


def servers_to_json(servers: Sequence[TaskServer]) -> bytes:
    return json.dumps([asdict(one) for one in servers]).encode()


def servers_from_json(content: bytes) -> tuple[TaskServer, ...]:
    return servers_from(json.loads(content))


def servers_from(items: Sequence[dict[str, object]]) -> tuple[TaskServer, ...]:
    return tuple(
        TaskServer(str(one["interface"]), str(one["address"]), int(str(one["port"])), str(one["network"]))
        for one in items
    )


def plan_to_json(offers: Sequence[TaskOffer]) -> bytes:
    """The part of a plan that the tasks do not know yet."""
    return json.dumps([asdict(offer) for offer in offers]).encode()


def plan_from_json(content: bytes, job: MpiJob) -> Plan:
    offers = [TaskOffer.from_json(fields) for fields in json.loads(content)]
    return Plan(tuple(assign(offers)), job.rendezvous, job.token)
