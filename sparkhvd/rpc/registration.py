"""How the tasks of a job describe themselves to the driver and to each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskOffer:
    """The description of one task, from which ranks are assigned.

    Attributes:
        task_index: its index in the job; in an elastic Spark job, the number of its lease.
        host_hash: equal for tasks that may share memory.
        host: the name or address of its host in the cluster.
        bind_host: the address that its rank binds.
        devices: the GPUs that are assigned to it, by their CUDA names on its host.
        device_kind: the kind of GPU that its rank computes on; empty if it has none.
        versions: the versions of the packages that the job compares, such as ``torch 2.8.0``.
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
    """The introduction of a Spark task: to the other tasks of a barrier job, or to the driver of an elastic job.

    Attributes:
        attempt: the id of its attempt, unique in the application.
        offer: its offer.
        port: the port of the rendezvous that it serves; 0 if it serves none.
    """

    attempt: int
    offer: TaskOffer
    port: int


@dataclass(frozen=True)
class TaskServer:
    """A server of a task on one network interface.

    Attributes:
        interface: the name of the interface.
        address: the address that the server binds.
        port: its port.
        network: the network of the address, such as ``10.1.0.0/16``.
    """

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
        orted: the path of ``orted``; empty if its host has none.
        problem: why the task cannot take part in the job; empty if it can.
    """

    attempt: int
    offer: TaskOffer
    servers: tuple[TaskServer, ...]
    orted: str
    problem: str = ""
