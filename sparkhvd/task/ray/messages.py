"""The messages that Ray carries between the driver of the ray launcher and its actors.

Actors also send ``HostReady``, ``HostDone``, ``HostLost`` and ``Output``, like the host processes of the ssh launcher:
an actor is a host of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Node:
    """The Ray node of an actor.

    Attributes:
        node_id: its id in the Ray cluster.
        address: its address in the Ray cluster.
    """

    node_id: str
    address: str


@dataclass(frozen=True)
class RankPart:
    """From driver to actor: the actor's part of a job.

    Attributes:
        index: the number of the actor; actor 0 serves the rendezvous.
        nodes: the addresses of the nodes of all actors, by number.
        cpus: the number of the rank's cores.
        takes_commands: whether the rank runs the commands of a ``RayExecutor``.
        token: the secret that the ranks share.
    """

    index: int
    nodes: tuple[str, ...]
    cpus: int
    takes_commands: bool
    token: bytes = field(repr=False)


@dataclass(frozen=True)
class RankPhase:
    """From actor to driver: a new phase of its rank."""

    phase: str
