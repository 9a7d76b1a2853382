"""A job of the mpi launcher, and what the environment of its ranks says."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkhvd.task.job import Job

# Environment of orted, which the ranks inherit: the Python to start and in which folder, and the way to the task that
# watches over them.
EXECUTABLE = "SPARKHVD_EXECUTABLE"
FOLDER = "SPARKHVD_FOLDER"
RANK_SOCKET = "SPARKHVD_RANK_SOCKET"
RANK_SECRET = "SPARKHVD_RANK_SECRET"  # noqa: S105 - the name of a variable

# What mpirun starts as every rank; the Python is the one of the host where the rank runs. Open MPI would start it in
# the driver's folder, or at home; what Spark puts beside an executor (``--files``) lies in the executor's.
RANK_COMMAND = ("/bin/sh", "-c", f'cd "${FOLDER}" && exec "${EXECUTABLE}" -m sparkhvd.task.mpi.rank')


@dataclass(frozen=True)
class MpiJob:
    """A job on its way to the tasks of this launcher.

    Attributes:
        job: the job; the driver's service listens where it takes the output.
        rendezvous: where the driver serves the rendezvous.
        token: the secret of the rendezvous.
    """

    job: Job
    rendezvous: tuple[tuple[str, int], ...]
    token: bytes = field(repr=False)
