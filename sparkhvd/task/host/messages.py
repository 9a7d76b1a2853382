"""The messages between a launcher and its process on a host, over the stdin and stdout of that process.

The messages are pickled, so both ends must trust each other. The pipes are private on this machine; ssh or Slurm
connects them to another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkhvd.comm.connect.launch_context import MembershipAddress
from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.task.job import Job
from sparkhvd.task.supervision import Outcome

# Output before the marker comes from the host itself, such as a message of the day or a shell's start files.
MARKER = b"\nsparkhvd is ready\n"


@dataclass(frozen=True)
class HostSetup:
    """The settings of the launcher's process that a process on a host applies first.

    Attributes:
        environment: variables to set.
        folder: the working directory, used if it exists on the host.
    """

    environment: Mapping[str, str] = field(repr=False)
    folder: str


@dataclass(frozen=True)
class HostJob:
    """From launcher to host: the host's part of a job.

    Attributes:
        setup: the settings to apply first.
        job: the job.
        host: the user's name for this host.
        hosts: the user's names for all hosts.
        first_index: the number of this host's first slot.
        count: the number of this host's ranks.
        serves_rendezvous: whether this host serves the rendezvous.
        token: the secret that the ranks share.
    """

    setup: HostSetup
    job: Job = field(repr=False)
    host: str
    hosts: tuple[str, ...]
    first_index: int
    count: int
    serves_rendezvous: bool
    token: bytes = field(repr=False)


@dataclass(frozen=True)
class ElasticHostJob:
    """From launcher to host: the host's part of an elastic job.

    ``StartWorker``, ``SetRank`` and ``StopWorker`` follow; the host answers with the end of each worker.

    Attributes:
        setup: the settings to apply first.
        job: the job.
        host: the user's name for this host.
        number: the number of this process, unique within the job.
        slots: the number of this host's slots, which share its cores.
        membership: the membership server of the driver, under all its addresses.
        uses_ssh: whether ssh starts the process. If so, ssh's variables name one more address of the driver.
    """

    setup: HostSetup
    job: Job = field(repr=False)
    host: str
    number: int
    slots: int
    membership: MembershipAddress
    uses_ssh: bool


@dataclass(frozen=True)
class HostReady:
    """From host to launcher: the offers of its ranks; ``rendezvous_port`` is 0 if the rendezvous is on another host."""

    offers: tuple[TaskOffer, ...]
    rendezvous_port: int


@dataclass(frozen=True)
class HostDone:
    """From host to launcher: the results and outcomes of its ranks."""

    contents: Mapping[int, bytes | Outcome] = field(repr=False)


@dataclass(frozen=True)
class HostLost:
    """From host to launcher: the host can no longer take part in the job."""

    why: str
