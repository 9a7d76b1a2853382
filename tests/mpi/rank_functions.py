"""Functions that run in the ranks of the tests of the mpi launcher.

Ranks import this module by its name, so it imports neither pytest nor the driver's side.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.launch.misbehaviour import note_pid


def meet_through_both_worlds() -> dict[str, Any]:
    """Return the rank according to MPI and to our core, and a sum through each."""
    import numpy as np  # noqa: PLC0415
    from mpi4py import MPI  # noqa: PLC0415

    from sparkhvd.comm import session  # noqa: PLC0415
    from sparkhvd.comm.collectives.buffers import ReduceOp  # noqa: PLC0415

    session.init()
    communicator = session.current()
    world = communicator.world
    total = communicator.allreduce(np.array([world.rank + 1.0]), ReduceOp.SUM, name="sum")[0]
    print("said by", world.rank)
    return {
        "places": (world.rank, world.size, world.local_rank, world.local_size, world.cross_rank, world.cross_size),
        "mpi": (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size),
        "sums": (MPI.COMM_WORLD.allreduce(world.rank + 1), float(total)),
        "env": (
            os.environ.get("MINE"),
            os.environ.get("HOME"),
            os.environ.get("TMPDIR"),
            os.environ.get("OMP_NUM_THREADS"),
            os.environ.get("BY_MPIRUN"),
        ),
        "host": os.environ["CONTAINER_ID"],
        "secrets": [
            name for name in os.environ if name.startswith("SPARKHVD_") and ("SECRET" in name or "FOLDER" in name)
        ],
        "in environments": _secrets_in_environments(),
        "path": sys.path,
        "folder": str(Path.cwd()),
        "shmem": environment()["OMPI_MCA_shmem"],
        "tasks": tasks_of_this_job(),
    }


def environment() -> dict[str, str]:
    """Return the environment of this rank."""
    return dict(os.environ)


def tasks_of_this_job() -> tuple[int, int]:
    """Return the task above this rank, and the current number of tasks."""
    import psutil  # noqa: PLC0415

    above = next(one for one in psutil.Process().parents() if "tests.mpi.task_process" in one.cmdline())
    return above.pid, sum("tests.mpi.task_process" in one.cmdline() for one in above.parent().children())


def end_on_rank_1(how: str) -> None:
    """Run a rank that waits for its end; rank 1 fails in the given way."""
    from sparkhvd.comm import session  # noqa: PLC0415

    session.init()
    communicator = session.current()
    communicator.barrier(name="all are there")
    if communicator.world.rank != 1:
        time.sleep(600)
    print("last words", file=sys.stderr, flush=True)
    if how == "raise":
        raise ValueError("no luck")
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


class LateResult:
    """A result whose pickling takes ten minutes, and records that it has begun."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> str | tuple[object, ...]:
        note_pid(self._folder)
        time.sleep(600)
        return str, ("packed",)


def stay(folder: Path, phase: str = "while the ranks run") -> LateResult:
    """Run a rank that records its process once all ranks have connected, and stays in a phase forever."""
    from sparkhvd.comm import session  # noqa: PLC0415

    session.init()
    session.current().barrier(name="all are there")
    if phase == "while the ranks run":
        note_pid(folder)
        time.sleep(600)
    return LateResult(folder)


def _secrets_in_environments() -> set[str]:
    """Return the secrets in the initial environments of all processes of this host."""
    secrets = set()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environment.read_bytes().split(b"\0")
        except OSError:
            continue
        secrets |= {one for one in variables if one.startswith(b"SPARKHVD_") and b"SECRET" in one.partition(b"=")[0]}
    return {one.partition(b"=")[2].decode() for one in secrets}
