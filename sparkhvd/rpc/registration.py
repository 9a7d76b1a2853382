"""The reports of a job's tasks about themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskOffer:
    """The report of one task about itself to the other tasks.

    Attributes:
        task_index: its index in the stage.
        host_hash: equal for tasks that may share memory.
        host: the name of its host in the cluster.
        bind_host: the address that its rank binds.
        devices: the GPUs that Spark assigned to it, by their CUDA names on its host.
        device_kind: the kind of GPU that its rank computes on; empty without one.
        versions: the versions of the packages that the job compares, like ``torch 2.8.0``.
        container: the YARN container that it runs in, if any. Containers of one host may each have their own GPUs.
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
    """The report of a barrier launcher's task to the other tasks.

    Attributes:
        attempt: the id of its attempt, unique in the application.
        offer: its offer.
        port: the port of the rendezvous that it serves; 0 when it serves none.
    """

    attempt: int
    offer: TaskOffer
    port: int


@dataclass(frozen=True)
class TaskServer:
    """The address of a task's server on one network interface."""

    interface: str
    address: str
    port: int
    network: str


@dataclass(frozen=True)
class TaskRegistration:
    """The registration of an mpi launcher's task with the driver.

    Attributes:
        attempt: the id of its attempt, unique in the application.
        offer: its offer; ``bind_host`` is filled in once the interfaces are known.
        servers: its servers, one per network interface.
        orted: the path of ``orted``; empty when its host has none.
        problem: why it cannot take part; empty when it can.
    """

    attempt: int
    offer: TaskOffer
    servers: tuple[TaskServer, ...]
    orted: str
    problem: str = ""
