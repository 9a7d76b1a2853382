"""The rank and the number of ranks that a launcher passes to a process."""

from __future__ import annotations

import os

from sparkhvd.comm import session

__all__ = ["get_env_rank_and_size"]

_VARIABLES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def get_env_rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, before ``hvd.init``.

    If sparkhvd's launcher started several ranks, it provides both numbers. Otherwise they come from the first pair of
    variables of Horovod, Open MPI or PMI that is set; the default is 0 and 1.

    Raises:
        RuntimeError: one variable of a pair is set without the other.
    """
    world = session.launch_context().world
    if world.size > 1:
        return world.rank, world.size
    for names in _VARIABLES:
        rank, size = (os.environ.get(name) for name in names)  # noqa: TID251  the function is about the environment
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            raise RuntimeError(f"Only one of {names[0]} and {names[1]} is set. Set both or neither.")
    return 0, 1
