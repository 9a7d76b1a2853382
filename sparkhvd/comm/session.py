"""The communicator of this process: ``init()``, ``shutdown()``, ``current()``, and this process's place in its job.

This holds the one mutable variable of the package, because ``hvd.init()`` and ``hvd.rank()`` are functions by contract.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.connect import mpi
from sparkhvd.comm.connect.inherited_world import inherited_context
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousClient, RendezvousServer
from sparkhvd.comm.process_sets import MpiCommunicator, ProcessSet
from sparkhvd.comm.stall.report import StallReport
from sparkhvd.comm.subset import subset
from sparkhvd.config import Config, from_environment, started_by_mpi, warn_if_horovod_rank, warn_ignored_variables
from sparkhvd.deadline import Deadline
from sparkhvd.errors import ConfigError, DeadlineExceededError, NotInitializedError, SparkHvdError

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass
class _Session:
    lock: Lock = field(default_factory=Lock)  # guards all writes below; readers of `communicator` take no lock
    context: LaunchContext | None = None  # None: no launcher has said anything
    joined: Callable[[], None] | None = None  # tells the launcher
    communicator: Communicator | None = None
    everybody: ProcessSet = field(default_factory=lambda: ProcessSet([0]))  # registered while initialized
    server: RendezvousServer | None = None  # on rank 0 of a job that MPI has started
    from_mpi: bool = False
    # How often the ranks of each choice met. All of them count alike, so it names the scope of their next meeting.
    inits: Counter[tuple[int, ...]] = field(default_factory=Counter)
    watches_forks: bool = False
    forked: bool = False  # this process is a child of the one that was initialized


_ASK_SECONDS = 0.5  # for what the rendezvous knows or does not know

_session = _Session()

global_process_set = _session.everybody
"""The set of all ranks, usable between ``init()`` and ``shutdown()``."""


def set_launch_context(context: LaunchContext, joined: Callable[[], None] | None = None) -> None:
    """Tell the next ``init()`` how to find the other ranks; called by launchers before any user code.

    Args:
        context: the rank's place in the job.
        joined: called whenever ``init()`` has connected it.

    Raises:
        ConfigError: the process is already initialized.
    """
    with _session.lock:
        if _session.communicator is not None:
            raise ConfigError("A launch context came after init(); call shutdown() before offering another one.")
        _session.context = context
        _session.joined = joined
        _session.inits.clear()
        _session.forked = False


def launch_context() -> LaunchContext:
    """This process's place in its job as its launcher said it; that of a job of one rank where none did."""
    return _session.context or LaunchContext(config=_own_config())


def init(
    comm: Sequence[int] | MPI.Intracomm | None = None,
    process_sets: Sequence[ProcessSet | Iterable[int] | MpiCommunicator] | str | None = None,
) -> None:
    """Connect this process to the other ranks of its job.

    The launcher says who they are. Without one they are the processes that mpirun has started (mpi4py has to be
    installed), else this process is a job of one rank.

    Collective: every rank must call it. Calling it again without ``shutdown()`` does nothing; after ``shutdown()`` the
    ranks connect anew. A rank on which it failed may call it again: ranks that still wait, or come later, join
    it there.

    Args:
        comm: makes a job of its own of some ranks: a list of ranks of the launcher's job or of MPI's world, which
            are numbered anew in this order, or a communicator of mpi4py. Only these call ``init``.
        process_sets: sets of ranks to register, equal on all ranks. More may always be added by ``add_process_set()``,
            so that Horovod's word "dynamic" means none here.

    Raises:
        ConfigError: ``comm`` does not hold this rank, a process set cannot be registered, or this process was forked
            from a rank.
        DeadlineExceededError: not all ranks came within the configured ``start_timeout``.
        AuthenticationError: a peer doesn't know the job's secret.
    """
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ConfigError(f"process_sets={process_sets!r} is neither a list of process sets nor 'dynamic'.")
    sets = () if process_sets is None or isinstance(process_sets, str) else process_sets
    ranks = tuple(comm) if isinstance(comm, Sequence) else None
    with _session.lock:
        if _session.communicator is not None:
            return
        if _session.context is None:
            _session.context = inherited_context()
        _session.from_mpi = _is_of_mpi(comm)
        if _session.forked and (_session.from_mpi or _session.context is not None):
            raise ConfigError(
                "This process was forked from a rank, whose place in the job it cannot take. Call hvd.init() in the "
                "rank's own process only."
            )
        communicator, server = _connected_sometime(comm, ranks, sets)
        _session.communicator = communicator
        _session.everybody.register(communicator.everybody)
        _session.server = server
        if not _session.watches_forks:
            _session.watches_forks = True
            os.register_at_fork(after_in_child=_leave_to_parent)
        if _session.joined is not None:
            _session.joined()


def _leave_to_parent() -> None:
    """After a fork, in the child: the job is the parent's."""
    _session.lock = Lock()  # a thread of the parent may have held it
    if _session.communicator is not None:
        _session.forked = True
        _session.communicator.leave_to_parent()


def _connected_sometime(
    comm: Sequence[int] | MPI.Intracomm | None,
    ranks: tuple[int, ...] | None,
    sets: Sequence[ProcessSet | Iterable[int] | MpiCommunicator],
) -> tuple[Communicator, RendezvousServer | None]:
    """The communicator of the next meeting of these ranks that does not fail before this rank comes."""
    whole = _session.context or LaunchContext()
    place = whole.world.rank if ranks is None else (*ranks, whole.world.rank).index(whole.world.rank)
    deadline = Deadline.after(whole.config.start_timeout)
    while True:
        # Ranks that MPI brings together meet at a server of their own each time.
        number = 1 if _session.from_mpi else _session.inits[ranks or ()] + 1
        scope, following = ("-".join(["init", str(n), *map(str, ranks or ())]) for n in (number, number + 1))
        try:
            if number > 1:
                _tell(whole, f"{scope}/begun")
            connected = _connected_once(comm, ranks, scope, sets)
        except BaseException as error:
            # A rank that failed before it came to the meeting is still awaited there.
            if _session.from_mpi or not _is_known(whole, f"{scope}/address/{place}", f"{scope}/connect-failure"):
                raise
            _session.inits[ranks or ()] = number
            if not isinstance(error, SparkHvdError) or deadline.expired() or not _is_known(whole, f"{following}/begun"):
                raise
        else:
            _session.inits[ranks or ()] = number
            return connected


def _tell(context: LaunchContext, key: str) -> None:
    if context.rendezvous:
        deadline = Deadline.after(context.config.start_timeout)
        with RendezvousClient(context.rendezvous, context.token, deadline, encrypt=context.config.encrypt) as store:
            store.set(key, b"", deadline)


def _is_known(context: LaunchContext, *keys: str) -> bool:
    """Whether the rendezvous has one of ``keys``."""
    if not context.rendezvous:
        return False
    deadline = Deadline.after(_ASK_SECONDS)
    try:
        with RendezvousClient(context.rendezvous, context.token, deadline, encrypt=context.config.encrypt) as store:
            for key in keys:
                try:
                    store.get(key, Deadline.after(_ASK_SECONDS))
                except DeadlineExceededError:
                    continue
                return True
    except SparkHvdError:
        return False  # nobody can meet there
    return False


def _connected_once(
    comm: Sequence[int] | MPI.Intracomm | None,
    ranks: tuple[int, ...] | None,
    scope: str,
    sets: Sequence[ProcessSet | Iterable[int] | MpiCommunicator],
) -> tuple[Communicator, RendezvousServer | None]:
    context, server = _meet(comm, ranks, scope)
    try:
        if context.config.log_level is not None:
            logging.getLogger("sparkhvd").setLevel(context.config.log_level)
        return _connected(context, scope, sets), server
    except BaseException:
        if server is not None:
            server.close()
        raise


def _connected(
    context: LaunchContext, scope: str, sets: Sequence[ProcessSet | Iterable[int] | MpiCommunicator]
) -> Communicator:
    communicator = Communicator(context, scope=scope)
    try:
        for process_set in sets:
            communicator.add_process_set(process_set)
    except BaseException:
        communicator.close()
        raise
    return communicator


def _is_of_mpi(comm: object) -> bool:
    """Whether MPI says who the ranks are."""
    if comm is not None and not isinstance(comm, Sequence):
        return True
    return _session.context is None and started_by_mpi()


def _meet(
    comm: Sequence[int] | MPI.Intracomm | None, ranks: tuple[int, ...] | None, scope: str
) -> tuple[LaunchContext, RendezvousServer | None]:
    """This process's place in the job, and the server that it owns in it, if any."""
    whole = _session.context or LaunchContext(config=_own_config())
    if not _session.from_mpi:
        if _session.context is None:
            warn_if_horovod_rank()
        return (whole if ranks is None else subset(whole, ranks, scope)), None
    if comm is None:
        comm = mpi.world_communicator()
    return mpi.meet(mpi.of_ranks(comm) if isinstance(comm, Sequence) else comm, whole.config)


def _own_config() -> Config:
    warn_ignored_variables()
    return from_environment()


def shutdown() -> None:
    """Leave the job; does nothing when not initialized."""
    with _session.lock:
        communicator, _session.communicator = _session.communicator, None
        _session.everybody.register(None)
        server, _session.server = _session.server, None
        try:
            if communicator is not None:
                communicator.close()
        finally:
            if server is not None:
                server.close()


def add_process_set(process_set: ProcessSet | Iterable[int] | MpiCommunicator) -> ProcessSet:
    """Register a set of ranks, see ``Communicator.add_process_set``; collective over all ranks."""
    return current().add_process_set(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a set of ranks out of use, see ``Communicator.remove_process_set``; collective over all ranks."""
    return current().remove_process_set(process_set)


def is_initialized() -> bool:
    """Whether ``init()`` has been called and ``shutdown()`` has not."""
    return _session.communicator is not None


def uses_mpi() -> bool:
    """Whether the ranks of this job come from MPI.

    Raises:
        NotInitializedError: before ``init()`` or after ``shutdown()``.
    """
    return current().world.size > 1 and _session.from_mpi


def current() -> Communicator:
    """The communicator that ``init()`` opened.

    Raises:
        NotInitializedError: before ``init()`` or after ``shutdown()``.
    """
    communicator = _session.communicator
    if communicator is None:
        if _session.inits:
            raise NotInitializedError("sparkhvd has been shut down; call hvd.init() to connect the ranks again.")
        raise NotInitializedError("sparkhvd has not been initialized; call hvd.init() first.")
    return communicator


def note_progress(text: str) -> None:
    """Say how far this rank's data is, such as "epoch 2, step 17 of 40"; shown when others wait for this rank."""
    current().note_progress(text)


def stall_report() -> StallReport | None:
    """Who kept this rank waiting when a collective last took longer than ``stall_check_seconds``."""
    return current().stall_report()


def rank() -> int:
    """This process's number among all ranks, from 0."""
    return current().world.rank


def size() -> int:
    """The number of ranks."""
    return current().world.size


def local_rank() -> int:
    """This process's number among the ranks of its host, from 0."""
    return current().world.local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return current().world.local_size


def cross_rank() -> int:
    """This host's number among the hosts that have a rank with this local rank."""
    return current().world.cross_rank


def cross_size() -> int:
    """The number of hosts that have a rank with this local rank."""
    return current().world.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return current().homogeneous
