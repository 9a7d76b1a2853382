"""The position of a rank in its job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkhvd.errors import ConfigError


@dataclass(frozen=True)
class World:
    """Position of a rank among all ranks, among those of its host, and among the hosts.

    YARN containers that each number their GPUs from 0 count as separate hosts here.

    ``local_rank`` counts the ranks of one host, ``cross_rank`` the ranks with the same ``local_rank`` over the hosts.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1

    def __post_init__(self) -> None:
        for name, rank, size in (
            ("rank", self.rank, self.size),
            ("local_rank", self.local_rank, self.local_size),
            ("cross_rank", self.cross_rank, self.cross_size),
        ):
            if not 0 <= rank < size:
                raise ConfigError(f"{name} must be within 0..{size - 1}, got {rank}.")


def layout(host_of_rank: Sequence[str]) -> list[World]:
    """Return the world of every rank, from the host that each rank runs on.

    Args:
        host_of_rank: one host key per rank, in rank order; ranks of one host need not be neighbors.

    Returns:
        One ``World`` per rank, in rank order. Hosts may hold different numbers of ranks; ``cross_size`` then counts
        only the hosts that have the rank's ``local_rank``.
    """
    hosts = list(dict.fromkeys(host_of_rank))
    ranks_of = {host: [r for r, h in enumerate(host_of_rank) if h == host] for host in hosts}
    worlds = []
    for rank, host in enumerate(host_of_rank):
        local_rank = ranks_of[host].index(rank)
        peers = [h for h in hosts if len(ranks_of[h]) > local_rank]
        worlds.append(
            World(
                rank=rank,
                size=len(host_of_rank),
                local_rank=local_rank,
                local_size=len(ranks_of[host]),
                cross_rank=peers.index(host),
                cross_size=len(peers),
            )
        )
    return worlds
