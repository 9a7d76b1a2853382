"""A job of the mpi launcher, and the environment variables of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkhvd.task.job import Job

# Environment variables of orted that the ranks inherit: the Python to start, its working directory, and how to connect
# to the task that supervises them.
EXECUTABLE = "SPARKHVD_EXECUTABLE"
FOLDER = "SPARKHVD_FOLDER"
RANK_SOCKET = "SPARKHVD_RANK_SOCKET"
RANK_SECRET = "SPARKHVD_RANK_SECRET"  # noqa: S105 - the name of a variable

# The command that mpirun starts as every rank, with the Python of the rank's host. It changes to the executor's working
# directory, which has Spark's ``--files``. Open MPI starts it in the driver's working directory or the home directory.
RANK_COMMAND = ("/bin/sh", "-c", f'cd "${FOLDER}" && exec "${EXECUTABLE}" -P -m sparkhvd.task.mpi.rank')


@dataclass(frozen=True)
class MpiJob:
    """A job as sent to the tasks of this launcher.

    Attributes:
        job: the job; the driver's service listens at its ``driver_addresses``.
        rendezvous: the addresses at which the driver serves the rendezvous, tried in order.
        token: the secret of the rendezvous.
    """

    job: Job
    rendezvous: tuple[tuple[str, int], ...]
    token: bytes = field(repr=False)
