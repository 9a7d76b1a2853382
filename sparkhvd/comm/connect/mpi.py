"""Ranks that MPI has started or grouped: MPI numbers them, and the core connects them through its own links.

After ``Agreements.reach()`` has returned, only process sets of mpi4py communicators use MPI when they are added. So
a program may use mpi4py freely.
"""

from __future__ import annotations

import math
import secrets
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from sparkhvd._util.addresses import address_to_bind
from sparkhvd._util.background import in_background, is_done_within
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


class MpiRequest(Protocol):
    """The part of an ``mpi4py.MPI.Request`` that sparkhvd uses for process sets."""

    def Test(self) -> bool:  # noqa: N802 - the name is mpi4py's
        """Return whether the operation has completed."""
        ...


@runtime_checkable
class MpiCommunicator(Protocol):
    """The part of an ``mpi4py.MPI.Comm`` that process sets use; a null communicator is false."""

    def allgather(self, sendobj: int) -> list[int]:
        """Return the objects of all members."""
        ...

    def Ibarrier(self) -> MpiRequest:  # noqa: N802 - the name is mpi4py's
        """Return a request that completes when all members have called this."""
        ...


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


def require_member(rank: int, size: int, ranks: Sequence[int]) -> None:
    """Raise ``ConfigError`` unless ``ranks`` are different ranks of a job of ``size``, with ``rank`` among them."""
    if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= member < size for member in ranks):
        raise ConfigError(f"comm={list(ranks)} must list distinct ranks from 0 to {size - 1}.")
    if rank not in ranks:
        raise ConfigError(f"Rank {rank} is not in comm={list(ranks)}; only those ranks may call init().")


Agreement = tuple[LaunchContext, RendezvousServer | None]


class Agreements:
    """Agreements of ranks on a rendezvous and a secret.

    MPI matches the collective calls of the ranks by their order, and cannot withdraw a call that waits for other ranks.
    So if not all ranks call in time, the next call for the same ranks continues the agreement.
    """

    def __init__(self) -> None:
        self._unfinished: list[tuple[MPI.Intracomm | tuple[int, ...], Future[Agreement]]] = []

    def reach(self, comm: MPI.Intracomm | Sequence[int], config: Config) -> Agreement:
        """Agree on a rendezvous and a secret; collective over the ranks.

        Args:
            comm: its ranks, or these ranks of MPI's world, become the ranks of the job.
            config: settings of this process.

        Returns:
            This rank's launch context; and, on rank 0 of several, the rendezvous server, which the caller closes after
            the job.

        Raises:
            ConfigError: this process is not among the ranks.
            DeadlineExceededError: not all ranks called it within ``config.start_timeout``.
        """
        own_rank, size = _position(comm)
        if not has_threads():  # then the time limit covers only the wait for the other ranks of a communicator
            return _agree(comm, config, Deadline.after(config.start_timeout))
        key = tuple(comm) if isinstance(comm, Sequence) else comm
        agreement = next((future for others, future in self._unfinished if others == key), None)
        if agreement is None:
            agreement = in_background(partial(_agree, comm, config, Deadline(math.inf)), "sparkhvd-mpi")
            self._unfinished.append((key, agreement))
        if not is_done_within(agreement, config.start_timeout):
            raise _missing_ranks(own_rank, size, config.start_timeout)
        self._unfinished.remove((key, agreement))
        context, server = agreement.result()
        return replace(context, config=config), server


def _position(comm: MPI.Intracomm | Sequence[int]) -> tuple[int, int]:
    """Return this process's number among the ranks, and their number.

    Raises:
        ConfigError: this process is not among them.
    """
    if not isinstance(comm, Sequence):
        return comm.Get_rank(), comm.Get_size()
    world = world_communicator()
    require_member(world.Get_rank(), world.Get_size(), comm)
    return list(comm).index(world.Get_rank()), len(comm)


def _agree(comm: MPI.Intracomm | Sequence[int], config: Config, deadline: Deadline) -> Agreement:
    communicator = _of_ranks(comm) if isinstance(comm, Sequence) else comm
    if not have_all_called(communicator, deadline):
        raise _missing_ranks(communicator.Get_rank(), communicator.Get_size(), config.start_timeout)
    duplicate = communicator.Dup()  # separates these messages from those of the program
    try:
        return _exchange_contexts(duplicate, config)
    finally:
        duplicate.Free()


def _of_ranks(ranks: Sequence[int]) -> MPI.Intracomm:
    """Return a communicator of some ranks of MPI's world; collective over these ranks only."""
    world = world_communicator()
    return world.Create_group(world.Get_group().Incl(list(ranks)))


def have_all_called(communicator: MpiCommunicator, deadline: Deadline) -> bool:
    """Wait until all ranks of the communicator have called this, and return whether they have by the deadline.

    MPI's own collectives would wait without a limit, and use a processor core.
    """
    pause = _FIRST_PAUSE_SECONDS
    barrier = communicator.Ibarrier()
    while not barrier.Test():
        if deadline.expired():
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return True


def _missing_ranks(rank: int, size: int, seconds: float) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"Rank {rank} waited start_timeout={seconds:g} s in init() for all {size} ranks that MPI "
        "started, but at least one of them did not call it. Print a line right after init() to find the rank "
        "that does not reach it, or raise SPARKHVD_START_TIMEOUT."
    )


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
