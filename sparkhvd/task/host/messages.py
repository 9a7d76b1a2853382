"""What a launcher and the process that it starts on a host tell each other over that process's stdin and stdout.

These are pickles: the pipes are private on this machine, and ssh authenticates and encrypts them to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.task.job import Job
from sparkhvd.task.supervision import Outcome

# What comes before is the host's own (a message of the day, a shell's start files).
MARKER = b"\nsparkhvd is ready\n"


@dataclass(frozen=True)
class HostJob:
    """Launcher to host: its part of a job.

    Attributes:
        job: the job.
        host: how the user calls this host.
        hosts: how the user calls all of them.
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
    """Host to launcher: what its ranks came to."""

    contents: Mapping[int, bytes | Outcome] = field(repr=False)


@dataclass(frozen=True)
class HostLost:
    """Host to launcher: it cannot take part any more."""

    why: str
