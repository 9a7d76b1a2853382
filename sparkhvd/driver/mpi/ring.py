"""Over which addresses the tasks of a job and its driver reach each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError
from sparkhvd.rpc.client import Client, connect
from sparkhvd.rpc.messages import ProbeServers, Reachable
from sparkhvd.rpc.registration import TaskRegistration, TaskServer

# Most of the time is spent waiting for addresses that lead nowhere.
_AT_ONCE = 64
_CONNECT_SECONDS = 30.0
_PROBE_SECONDS = 60.0


@dataclass(frozen=True)
class Link:
    """The driver's connection to a task, over the address that the next task reaches it at, too."""

    server: TaskServer
    client: Client


def linked(tasks: Sequence[TaskRegistration], secret: bytes, *, encrypt: bool = False) -> list[Link]:
    """A connection to every task, over an address where it is reached from the task before it and from here.

    Everything is tried at the same time. With ``encrypt`` a task that does not encrypt is refused.

    Raises:
        LaunchError: a task has no such address.
        OSError: a task is not reached from here at all, or was lost.
    """
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="sparkhvd-probe") as pool:
        attempts = [[pool.submit(_link, server, secret, encrypt) for server in task.servers] for task in tasks]
        tried = [[attempt.result() for attempt in row] for row in attempts]
        links = [[one for one in row if isinstance(one, Link)] for row in tried]
        chosen: list[Link] = []
        try:
            for task, row in zip(tasks, tried, strict=True):
                errors = [str(one) for one in row if isinstance(one, OSError)]
                if len(errors) == len(row):
                    raise ConnectionError(f"{task.offer.host} cannot be reached: {' '.join(errors)}")
            answers = pool.map(_probed, [row[0] for row in links], [*tasks[1:], tasks[0]])
            reached = list(answers)
            usable = [
                [one for one in row if one.server.address in there]
                for row, there in zip(links, [reached[-1], *reached[:-1]], strict=True)
            ]
            chosen += _chosen(tasks, usable)
        finally:
            for link in (one for row in links for one in row if one not in chosen):
                link.client.close()
    return chosen


def in_common(usable: Sequence[Sequence[TaskServer]]) -> list[TaskServer]:
    """One server of every task: of a network that all of them have, of an interface of one name, or the first.

    Args:
        usable: for every task, those that can be taken.

    Returns:
        By task; empty when one has none.
    """
    if not all(usable):
        return []
    for attribute in ("network", "interface"):
        for wanted in (getattr(server, attribute) for server in usable[0]):
            found = [[one for one in servers if getattr(one, attribute) == wanted] for servers in usable]
            if all(found):
                return [servers[0] for servers in found]
    return [servers[0] for servers in usable]


def _chosen(tasks: Sequence[TaskRegistration], usable: Sequence[Sequence[Link]]) -> list[Link]:
    servers = in_common([[link.server for link in row] for row in usable])
    if not servers:
        there = {
            task.offer.host: [f"{server.interface} {server.address}" for server in task.servers]
            for task, row in zip(tasks, usable, strict=True)
            if not row
        }
        raise LaunchError(
            f"Some hosts have no address at which both the driver and another host reach them: {there}. Name the right "
            "network interfaces with nics=, or open the network between the hosts."
        )
    return [next(one for one in row if one.server == server) for row, server in zip(usable, servers, strict=True)]


def _link(server: TaskServer, secret: bytes, encrypt: bool) -> Link | OSError:
    deadline = Deadline.after(_CONNECT_SECONDS)
    try:
        return Link(server, connect([(server.address, server.port)], secret, deadline, encrypt=encrypt))
    except OSError as error:
        return error


def _probed(link: Link, following: TaskRegistration) -> Collection[str]:
    """The addresses at which a task reaches the next one."""
    answer = link.client.ask(ProbeServers(following.servers), Deadline.after(_PROBE_SECONDS))
    if not isinstance(answer, Reachable):
        raise LaunchError(f"A task answered a probe with {type(answer).__name__}.")
    return answer.addresses
