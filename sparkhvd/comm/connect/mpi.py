"""Ranks that MPI has started or grouped: MPI numbers them, and the core connects them through its own links.

After ``agree_on_rendezvous()`` has returned, only process sets of mpi4py communicators use MPI when they are added. So
a program may use mpi4py freely.
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
from sparkhvd.config import Config, mpirun_size
from sparkhvd.deadline import Deadline
from sparkhvd.errors import CollectiveError, ConfigError, DeadlineExceededError
from sparkhvd.world import layout

if TYPE_CHECKING:
    from mpi4py import MPI

_TOKEN_BYTES = 32
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1e-5, 1e-2


def available() -> bool:
    """Return whether mpi4py is installed."""
    return find_spec("mpi4py") is not None


def world_communicator() -> MPI.Intracomm:
    """Return MPI's communicator of all processes.

    Raises:
        ConfigError: mpi4py is not installed, or does not belong to the ``mpirun`` that started this process.
    """
    try:
        from mpi4py import MPI  # noqa: PLC0415  importing it initializes MPI
    except ImportError as error:
        raise ConfigError(
            f"mpirun started this process, but mpi4py, which provides its rank, cannot be imported ({error}). If it is "
            "not installed, run pip install 'sparkhvd[mpi]'."
        ) from error
    if (started := mpirun_size()) > 1 and MPI.COMM_WORLD.Get_size() == 1:
        raise ConfigError(
            f"mpirun started {started} processes, but mpi4py uses another MPI than mpirun and finds only this one "
            f"({MPI.Get_library_version().split(',')[0].strip()}). Start the program with the mpirun of that MPI."
        )
    return MPI.COMM_WORLD


def has_threads() -> bool:
    """Return whether several threads may call MPI at once."""
    from mpi4py import MPI  # noqa: PLC0415  importing it initializes MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def of_ranks(ranks: Sequence[int]) -> MPI.Intracomm:
    """Return a communicator of some ranks of MPI's world; collective over these ranks only.

    Raises:
        ConfigError: this process is not among them.
    """
    world = world_communicator()
    require_member(world.Get_rank(), world.Get_size(), ranks)
    return world.Create_group(world.Get_group().Incl(list(ranks)))


def require_member(rank: int, size: int, ranks: Sequence[int]) -> None:
    """Raise ``ConfigError`` unless ``ranks`` are different ranks of a job of ``size``, with ``rank`` among them."""
    if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= member < size for member in ranks):
        raise ConfigError(f"comm={list(ranks)} must list distinct ranks from 0 to {size - 1}.")
    if rank not in ranks:
        raise ConfigError(f"Rank {rank} is not in comm={list(ranks)}; only those ranks may call init().")


def agree_on_rendezvous(communicator: MPI.Intracomm, config: Config) -> tuple[LaunchContext, RendezvousServer | None]:
    """Agree on a rendezvous and a secret; collective over the communicator.

    Args:
        communicator: its ranks become the ranks of the job.
        config: settings of this process.

    Returns:
        This rank's launch context; and, on rank 0 of several, the rendezvous server, which the caller closes after
        the job.

    Raises:
        DeadlineExceededError: not all ranks called it within ``config.start_timeout``.
    """
    _wait_for_all(communicator, config.start_timeout)
    duplicate = communicator.Dup()  # separates these messages from those of the program
    try:
        return _exchange_contexts(duplicate, config)
    finally:
        duplicate.Free()


def _wait_for_all(communicator: MPI.Intracomm, seconds: float) -> None:
    """Wait until all ranks of the communicator have called: MPI's own collectives wait without a limit."""
    deadline, pause = Deadline.after(seconds), _FIRST_PAUSE_SECONDS
    barrier = communicator.Ibarrier()
    while not barrier.Test():
        if deadline.expired():
            rank, size = communicator.Get_rank(), communicator.Get_size()
            raise DeadlineExceededError(
                f"Rank {rank} waited start_timeout={seconds:g} s in init() for all {size} ranks that MPI "
                "started, but at least one of them did not call it. Print a line right after init() to find the rank "
                "that does not reach it, or raise SPARKHVD_START_TIMEOUT."
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _exchange_contexts(communicator: MPI.Intracomm, config: Config) -> tuple[LaunchContext, RendezvousServer | None]:
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
    server, published = None, None
    if rank == 0:
        try:
            server = RendezvousServer(token, bind_host, encrypt=config.encrypt)
            published = (bind_host, server.port, token, "")
        except CollectiveError as error:
            published = (bind_host, 0, token, str(error))
    address, port, token, problem = communicator.bcast(published)
    if problem:
        raise CollectiveError(f"Rank 0 on host {hosts[0]} cannot start the rendezvous server: {problem}")
    context = LaunchContext(
        world=layout(host_keys)[rank],
        rendezvous=((address, port),),
        token=token,
        host_key=host_keys[rank],
        bind_host=bind_host,
        config=config,
    )
    return context, server
