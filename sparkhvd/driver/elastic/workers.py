"""What the controller needs of the place where workers run, and the events that reach it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from sparkhvd.comm.connect.membership import Report
from sparkhvd.task.failure_report import FailureReport


@dataclass(frozen=True)
class Reported:
    """A worker has reported to the membership server."""

    worker: int
    report: Report


@dataclass(frozen=True)
class Returned:
    """The pickled result of a worker has arrived."""

    worker: int
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Lost:
    """A worker raised, exited, was killed, or could not be started."""

    worker: int
    failure: FailureReport


@dataclass(frozen=True)
class Offered:
    """The slots by host have changed."""

    capacity: dict[str, int]


@dataclass(frozen=True)
class DiscoveryFailed:
    """The slots could not be found out; ``first`` if they never could."""

    why: str
    first: bool


Event = Reported | Returned | Lost | Offered | DiscoveryFailed


@dataclass(frozen=True)
class Place:
    """Where a worker runs, for the other ranks.

    Attributes:
        host_key: equal for workers that may share memory.
        host: the name of the host in messages.
        bind_host: the address at which the other ranks reach it best.
    """

    host_key: str
    host: str
    bind_host: str


class Workers(Protocol):
    """Starts and ends workers on the hosts of one kind of cluster; their ends arrive as events."""

    def unusable(self, host: str) -> str:
        """Return why no worker can run on a host; empty if it can."""

    def start(self, worker: int, host: str) -> Place:
        """Start a worker, or report ``Lost`` for it."""

    def assign(self, worker: int, rank: int, num_proc: int) -> None:
        """Note the rank of a worker in a new generation."""

    def stop(self, worker: int) -> None:
        """Begin to end a worker; does not wait."""

    def close(self) -> None:
        """End all workers and wait for their ends."""
