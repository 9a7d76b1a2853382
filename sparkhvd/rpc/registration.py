"""What the tasks of a job tell about themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskOffer:
    """What one task tells the others about itself.

    Attributes:
        task_index: its number in the stage.
        host_hash: equal for tasks that may share memory.
        host: how the cluster calls its host.
        bind_host: the address that its rank binds.
        devices: the GPUs that Spark gave it, by the names that CUDA knows on its host.
        device_kind: what its rank computes on; empty without a GPU.
        versions: of the packages that the job asks about, like ``torch 2.8.0``.
        container: of YARN, where it runs in one; it may see the same host as others do, and GPUs of its own.
    """

    task_index: int
    host_hash: str
    host: str
    bind_host: str
    devices: tuple[str, ...] = ()
    device_kind: str = ""
    versions: tuple[str, ...] = ()
    container: str = ""


@dataclass(frozen=True)
class Introduction:
    """What a task of the barrier launcher tells the others.

    Attributes:
        attempt: the number of its attempt, unlike that of any other task of the application.
        offer: its place.
        port: where it serves the rendezvous; 0 where it does not.
    """

    attempt: int
    offer: TaskOffer
    port: int


@dataclass(frozen=True)
class TaskServer:
    """Where a task listens on one of its network interfaces."""

    interface: str
    address: str
    port: int
    network: str


@dataclass(frozen=True)
class TaskRegistration:
    """What a task of the mpi launcher tells the driver about itself.

    Attributes:
        attempt: the number of its attempt, unlike that of any other task of the application.
        offer: its place; ``bind_host`` is filled in when the interfaces are known.
        servers: where it listens.
        orted: the path of ``orted``, empty when its host has none.
        problem: why it cannot take part, empty when it can.
    """

    attempt: int
    offer: TaskOffer
    servers: tuple[TaskServer, ...]
    orted: str
    problem: str = ""
