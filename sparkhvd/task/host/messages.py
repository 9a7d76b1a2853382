"""The messages between a launcher and its process on a host, over the stdin and stdout of that process.

These are pickles: the pipes are private on this machine, and ssh authenticates and encrypts them to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.task.job import Job
from sparkhvd.task.supervision import Outcome

# Output before the marker belongs to the host (a message of the day, a shell's start files).
MARKER = b"\nsparkhvd is ready\n"


@dataclass(frozen=True)
class HostJob:
    """Launcher to host: its part of a job.

    Attributes:
        job: the job.
        host: the user's name of this host.
        hosts: the user's names of all hosts.
        first_index: number of this host's first slot.
        count: how many ranks it runs.
        serves: whether it serves the rendezvous.
        token: the job's secret.
        environment: variables of the launcher that hold here, too.
        folder: the working directory, where there is one of that name.
    """

    job: Job = field(repr=False)
    host: str
    hosts: tuple[str, ...]
    first_index: int
    count: int
    serves: bool
    token: bytes = field(repr=False)
    environment: Mapping[str, str] = field(repr=False)
    folder: str


@dataclass(frozen=True)
class HostReady:
    """Host to launcher: what its ranks need to be found; the port is that of the rendezvous, 0 elsewhere."""

    offers: tuple[TaskOffer, ...]
    rendezvous_port: int


@dataclass(frozen=True)
class HostDone:
    """Host to launcher: the results and outcomes of its ranks."""

    contents: Mapping[int, bytes | Outcome] = field(repr=False)


@dataclass(frozen=True)
class HostLost:
    """Host to launcher: it cannot take part any more."""

    why: str
