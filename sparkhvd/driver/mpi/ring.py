"""The choice of addresses at which the tasks of a job and its driver reach each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice

from sparkhvd._util.background import in_threads
from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError
from sparkhvd.rpc.client import Client, connect
from sparkhvd.rpc.messages import ProbeServers, Reachable
from sparkhvd.rpc.registration import TaskRegistration, TaskServer

# The number of threads may exceed the number of cores: most of them wait for unreachable addresses.
_MAX_THREADS = 64
_THREAD = "sparkhvd-probe"
_CONNECT_SECONDS = 30.0
_PROBE_SECONDS = 60.0


@dataclass(frozen=True)
class Link:
    """The driver's connection to a task, at an address that its neighbor in the ring reaches, too."""

    server: TaskServer
    client: Client


def connect_ring(tasks: Sequence[TaskRegistration], secret: bytes, *, encrypt: bool = False) -> list[Link]:
    """Connect to every task, at an address that both the previous task and the driver reach.

    All addresses are tried at the same time. With ``encrypt``, tasks that do not encrypt are refused.

    Raises:
        LaunchError: a task has no such address.
        OSError: a task cannot be reached from the driver, or was lost.
    """
    servers = [server for task in tasks for server in task.servers]
    opened = iter(in_threads(lambda server: _open_link(server, secret, encrypt), servers, _MAX_THREADS, _THREAD))
    results = [list(islice(opened, len(task.servers))) for task in tasks]
    links = [[result for result in row if isinstance(result, Link)] for row in results]
    chosen: list[Link] = []
    try:
        for task, row in zip(tasks, results, strict=True):
            errors = [str(result) for result in row if isinstance(result, OSError)]
            if len(errors) == len(row):
                raise ConnectionError(f"{task.offer.host} cannot be reached: {' '.join(errors)}")
        neighbors = [(row[0], task) for row, task in zip(links, [*tasks[1:], tasks[0]], strict=True)]
        reachable = in_threads(lambda pair: _reachable_addresses(*pair), neighbors, _MAX_THREADS, _THREAD)
        usable = [
            [link for link in row if link.server.address in addresses]
            for row, addresses in zip(links, [reachable[-1], *reachable[:-1]], strict=True)
        ]
        chosen += _choose_links(tasks, usable)
    finally:
        for link in (candidate for row in links for candidate in row if candidate not in chosen):
            link.client.close()
    return chosen


def choose_servers(usable: Sequence[Sequence[TaskServer]]) -> list[TaskServer]:
    """Return one server per task: on a network common to all tasks, on interfaces of the same name, or the first.

    Args:
        usable: for every task, the servers to choose from.

    Returns:
        The servers by task; empty if a task has none.
    """
    if not all(usable):
        return []
    for attribute in ("network", "interface"):
        for value in (getattr(server, attribute) for server in usable[0]):
            matching = [[server for server in servers if getattr(server, attribute) == value] for servers in usable]
            if all(matching):
                return [servers[0] for servers in matching]
    return [servers[0] for servers in usable]


def _choose_links(tasks: Sequence[TaskRegistration], usable: Sequence[Sequence[Link]]) -> list[Link]:
    servers = choose_servers([[link.server for link in row] for row in usable])
    if not servers:
        addresses = {
            task.offer.host: [f"{server.interface} {server.address}" for server in task.servers]
            for task, row in zip(tasks, usable, strict=True)
            if not row
        }
        raise LaunchError(
            f"Some hosts have no address at which both the driver and another host reach them: {addresses}. Name the "
            "right network interfaces with nics=, or open the network between the hosts."
        )
    return [next(link for link in row if link.server == server) for row, server in zip(usable, servers, strict=True)]


def _open_link(server: TaskServer, secret: bytes, encrypt: bool) -> Link | OSError:
    deadline = Deadline.after(_CONNECT_SECONDS)
    try:
        return Link(server, connect([(server.address, server.port)], secret, deadline, encrypt=encrypt))
    except OSError as error:
        return error


def _reachable_addresses(link: Link, following: TaskRegistration) -> Collection[str]:
    """Return the addresses at which a task reaches the next task."""
    answer = link.client.ask(ProbeServers(following.servers), Deadline.after(_PROBE_SECONDS))
    if not isinstance(answer, Reachable):
        raise LaunchError(f"A task sent an unexpected answer of type {type(answer).__name__} to a probe.")
    return answer.addresses
