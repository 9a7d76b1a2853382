"""The launch context: the data that ``init()`` needs to find the other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkhvd.config import Config
from sparkhvd.world import World


@dataclass(frozen=True)
class MembershipAddress:
    """The address at which a worker of an elastic job learns its rank.

    Attributes:
        worker: the number of the worker.
        addresses: addresses of the driver's membership server, tried in order.
        token: the job's secret.
    """

    worker: int
    addresses: tuple[tuple[str, int], ...]
    token: bytes = field(repr=False)


@dataclass(frozen=True)
class LaunchContext:
    """One rank's position in a job and how to reach its peers; the default is a job of one rank.

    Attributes:
        world: the rank's position.
        rendezvous: addresses of the job's rendezvous server, tried in order; empty for one rank.
        token: the secret that the ranks share.
        host_key: equal for ranks that may share memory.
        bind_host: the local address at which peers can reach this rank best; unless it is a loopback, the rank also
            offers the host's other addresses.
        config: settings of the core.
        members: the ranks of the launcher's job that are renumbered here, in this order; empty for all of them.
        membership: where a worker of an elastic job learns its rank; None in other jobs.
        answer_timeout: seconds after which ``init()`` fails if a peer's host does not answer this rank at all; None
            means ``start_timeout``.
    """

    world: World = field(default_factory=World)
    rendezvous: tuple[tuple[str, int], ...] = ()
    token: bytes = field(default=b"", repr=False)
    host_key: str = ""
    bind_host: str = "127.0.0.1"
    config: Config = field(default_factory=Config)
    members: tuple[int, ...] = ()
    membership: MembershipAddress | None = None
    answer_timeout: float | None = None

    def rank_in_job(self, rank: int) -> int:
        """Return the number of a rank in the launcher's job."""
        return self.members[rank] if self.members else rank
