"""The protocol between the controller and the workers of one backend, and the events that reach the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from sparkhvd.comm.connect.membership import Report
from sparkhvd.task.elastic.worker import Lost, WorkerLocation, WorkerResult


@dataclass(frozen=True)
class Reported:
    """A worker has reported to the membership server."""

    worker: int
    report: Report


@dataclass(frozen=True)
class WorkerStarting:
    """A worker is about to start, and will run at ``location``."""

    worker: int
    location: WorkerLocation


@dataclass(frozen=True)
class Offered:
    """The slots have changed.

    Attributes:
        capacity: the number of slots by host, without the slots of ``withdrawn``.
        withdrawn: workers that still run, but whose slots are withdrawn.
    """

    capacity: dict[str, int]
    withdrawn: frozenset[int] = frozenset()


@dataclass(frozen=True)
class DiscoveryFailed:
    """The offered slots could not be determined, or were given back.

    Attributes:
        why: the reason, as a whole message.
        is_final: whether the job cannot continue.
    """

    why: str
    is_final: bool


Event = Reported | WorkerStarting | WorkerResult | Lost | Offered | DiscoveryFailed


class Workers(Protocol):
    """Starts and ends workers on the hosts of one kind of cluster; their locations and ends arrive as events."""

    def note_offer(self, capacity: Mapping[str, int]) -> Mapping[str, str]:
        """Note the offered slots; return the hosts on which no worker can run, with the reason for each."""

    def start(self, worker: int, host: str) -> None:
        """Begin to start a worker: ``WorkerStarting`` arrives before its reports, or ``Lost`` if it cannot start."""

    def assign(self, worker: int, rank: int) -> None:
        """Note the rank of a worker in a new generation."""

    def stop(self, worker: int) -> None:
        """Begin to end a worker, without waiting for its end."""

    def close(self) -> None:
        """End all workers and wait for their ends."""
