"""Ranks that MPI has started or grouped: it says who is who, and the core makes links of its own.

Nothing of MPI is used after ``meet()`` has returned, so a program may go on with mpi4py as it likes.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from sparkhvd._util.addresses import address_to_bind
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousServer
from sparkhvd.config import Config
from sparkhvd.deadline import Deadline
from sparkhvd.errors import CollectiveError, ConfigError, DeadlineExceededError
from sparkhvd.world import layout

if TYPE_CHECKING:
    from mpi4py import MPI

_TOKEN_BYTES = 32
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1e-5, 1e-2


def available() -> bool:
    """Whether mpi4py is installed."""
    return find_spec("mpi4py") is not None


def world_communicator() -> MPI.Intracomm:
    """MPI's communicator of all processes.

    Raises:
        ConfigError: mpi4py is not installed.
    """
    try:
        from mpi4py import MPI  # noqa: PLC0415  importing it initializes MPI
    except ImportError as error:
        raise ConfigError(
            "mpirun started this process, but mpi4py, which tells its rank, cannot be imported. Install it with "
            "pip install 'sparkhvd[mpi]'."
        ) from error
    return MPI.COMM_WORLD


def has_threads() -> bool:
    """Whether MPI may be called from several threads at once."""
    from mpi4py import MPI  # noqa: PLC0415  importing it initializes MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def of_ranks(ranks: Sequence[int]) -> MPI.Intracomm:
    """A communicator of some ranks of MPI's world; collective over these alone.

    Raises:
        ConfigError: this process is none of them.
    """
    world = world_communicator()
    require_member(world.Get_rank(), world.Get_size(), ranks)
    return world.Create_group(world.Get_group().Incl(list(ranks)))


def require_member(rank: int, size: int, ranks: Sequence[int]) -> None:
    """Raise ``ConfigError`` unless ``ranks`` are different ranks of a job of ``size``, with ``rank`` among them."""
    if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= each < size for each in ranks):
        raise ConfigError(f"comm={list(ranks)} are not different ranks of the {size} ranks 0..{size - 1}.")
    if rank not in ranks:
        raise ConfigError(f"This is rank {rank}, which is not in comm={list(ranks)}; only those ranks call init().")


def meet(communicator: MPI.Intracomm, config: Config) -> tuple[LaunchContext, RendezvousServer | None]:
    """Agree on a rendezvous and a secret; collective over the communicator.

    Args:
        communicator: its ranks become the ranks of the job.
        config: settings of this process.

    Returns:
        This rank's place and the way to its peers; and, on rank 0 of several, the server where they meet, which the
        caller closes after the job.

    Raises:
        DeadlineExceededError: not all ranks came within ``config.start_timeout``.
    """
    _wait_for_all(communicator, config.start_timeout)
    own = communicator.Dup()  # keeps what is said here apart from what the program says
    try:
        return _meet(own, config)
    finally:
        own.Free()


def _wait_for_all(communicator: MPI.Intracomm, seconds: float) -> None:
    """Wait until all ranks of the communicator are here: MPI's own collectives wait without a limit."""
    deadline, pause = Deadline.after(seconds), _FIRST_PAUSE_SECONDS
    barrier = communicator.Ibarrier()
    while not barrier.Test():
        if deadline.expired():
            rank, size = communicator.Get_rank(), communicator.Get_size()
            raise DeadlineExceededError(
                f"Rank {rank} waited start_timeout={seconds:g} s in init() for all {size} ranks that MPI "
                "started, and at least one of them did not call it. See which rank does not print a line right after "
                "init(), or raise SPARKHVD_START_TIMEOUT."
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _meet(communicator: MPI.Intracomm, config: Config) -> tuple[LaunchContext, RendezvousServer | None]:
    from mpi4py import MPI  # noqa: PLC0415  the caller has imported it

    rank, size = communicator.Get_rank(), communicator.Get_size()
    if size == 1:
        return LaunchContext(config=config), None
    memory = communicator.Split_type(MPI.COMM_TYPE_SHARED)
    host_keys: list[str] = communicator.allgather(f"mpi-{memory.bcast(rank)}")
    memory.Free()
    own_host = socket.gethostname()
    hosts: list[str] = communicator.allgather(own_host)
    bind_host = address_to_bind(own_host, hosts)
    token = secrets.token_bytes(_TOKEN_BYTES) if rank == 0 else b""
    server, offered = None, None
    if rank == 0:
        try:
            server = RendezvousServer(token, bind_host, encrypt=config.encrypt)
            offered = (bind_host, server.port, token, "")
        except CollectiveError as error:
            offered = (bind_host, 0, token, str(error))
    address, port, token, problem = communicator.bcast(offered)
    if problem:
        raise CollectiveError(f"Rank 0 on host {hosts[0]} cannot serve the rendezvous: {problem}")
    context = LaunchContext(
        world=layout(host_keys)[rank],
        rendezvous=((address, port),),
        token=token,
        host_key=host_keys[rank],
        bind_host=bind_host,
        config=config,
    )
    return context, server
