"""The communicator of this process: ``init()``, ``shutdown()``, ``current()``, and this process's position in its job.

It holds its state in a module variable, because ``hvd.init()`` and ``hvd.rank()`` are functions, as in Horovod.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import TYPE_CHECKING

from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.connect import mpi
from sparkhvd.comm.connect.commit_folder import CommitFolder, CommitPublisher
from sparkhvd.comm.connect.generation_watch import GenerationWatch
from sparkhvd.comm.connect.inherited_world import inherited_world
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.membership import LOST_CONNECTIONS, Membership, scope_of
from sparkhvd.comm.connect.mpi import MpiCommunicator
from sparkhvd.comm.connect.rendezvous import RendezvousClient, RendezvousServer
from sparkhvd.comm.process_sets import ProcessSet, require_addable
from sparkhvd.comm.stall.report import StallReport
from sparkhvd.comm.stall.stragglers import Straggler, publish_straggler
from sparkhvd.comm.subset import subset
from sparkhvd.config import (
    Config,
    from_environment,
    mpirun_size,
    setting_variables,
    warn_if_horovod_rank,
    warn_ignored_variables,
    with_changed_variables,
)
from sparkhvd.deadline import Deadline
from sparkhvd.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineExceededError,
    MismatchError,
    NotInitializedError,
    SparkHvdError,
)

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass
class _Session:
    # Guards all writes below; readers of `communicator` take no lock. Reentrant: a signal handler may call shutdown()
    # while its thread is in init().
    lock: RLock = field(default_factory=RLock)
    context: LaunchContext | None = None  # None: no launcher has set one
    # The settings in the environment when ``context`` arrived, which the launcher has taken into account.
    variables: dict[str, str] = field(default_factory=dict)
    joined: Callable[[], None] | None = None  # notifies the launcher
    communicator: Communicator | None = None
    everybody: ProcessSet = field(default_factory=lambda: ProcessSet([0]))  # registered while initialized
    server: RendezvousServer | None = None  # on rank 0 of a job that MPI has started
    from_mpi: bool = False
    agreements: mpi.Agreements = field(default_factory=mpi.Agreements)  # of the ranks that MPI has started
    membership: Membership | None = None  # in an elastic job, from the first ``init()`` on
    publisher: CommitPublisher | None = None  # in an elastic job with a Store
    watch: GenerationWatch | None = None  # in an elastic job, watches the current generation
    # How often each selection of ranks has connected. The numbers are equal on all ranks, so they name the scopes.
    inits: Counter[tuple[int, ...]] = field(default_factory=Counter)
    watches_forks: bool = False
    forked: bool = False  # this process is a child of the one that was initialized


# The time limit of a lookup in the rendezvous, which answers only once the key is set.
_LOOKUP_SECONDS = 0.5
# The time limit of a note for the ranks that wait for this one, at the end of its function.
_LEAVE_SECONDS = 10.0

# How many generations in a row may end with an ``AuthenticationError`` while they connect. A member that is lost in a
# handshake may be the cause of one of them.
_MAX_REFUSALS = 5
# The scope of the first ``init()`` of all ranks.
_FIRST_SCOPE = "init-1"
# The code of a lost peer in a failure that ranks publish while they connect; see core/base/failure_note.h.
_PEER_LOST = "F"
_NEVER_JOINED = "it ended without calling init()"
_ABSENT = re.compile(rf"lost rank (\d+): {re.escape(_NEVER_JOINED)}")

_session = _Session()

global_process_set = _session.everybody
"""The set of all ranks, usable between ``init()`` and ``shutdown()``."""


def set_launch_context(
    context: LaunchContext, joined: Callable[[], None] | None = None, commits: CommitFolder | None = None
) -> None:
    """Set how the next ``init()`` finds the other ranks; launchers call it before any user code.

    Args:
        context: the rank's position in the job.
        joined: called each time that ``init()`` has connected the rank.
        commits: where an elastic job publishes commits.

    Raises:
        ConfigError: the process is already initialized.
    """
    with _session.lock:
        if _session.communicator is not None:
            raise ConfigError(
                "This process is already initialized; call shutdown() before setting another launch context."
            )
        _session.context = context
        _session.variables = setting_variables()
        _session.joined = joined
        _session.publisher = None if commits is None else CommitPublisher(commits)
        _session.inits.clear()
        _session.forked = False
        if _session.membership is not None:
            _session.membership.close()
            _session.membership = None


def launch_context() -> LaunchContext:
    """Return the launch context that the launcher set, or else the context of a job with one rank."""
    return _session.context or LaunchContext(config=_own_config())


def init(
    comm: Sequence[int] | MPI.Intracomm | None = None,
    process_sets: Sequence[ProcessSet | Iterable[int] | MpiCommunicator] | str | None = None,
) -> None:
    """Connect this process to the other ranks of its job.

    The launcher provides their addresses. Without a launcher, the ranks are the processes that mpirun started
    (this needs mpi4py); without either, this process is a job of one rank.

    This function is collective: every rank must call it. Another call without ``shutdown()`` connects nothing. It
    accepts only process sets that already exist, and registers the objects that are passed for them. After
    ``shutdown()``, a call connects the ranks again. If a call fails on a rank, that rank may call again. The new call
    connects the rank with the ranks that are still waiting and with ranks that call later.

    Args:
        comm: makes some ranks a separate job: a list of ranks of the launcher's job or of MPI's world, which
            are renumbered in this order, or a communicator of mpi4py. Only these ranks call ``init``. An empty list
            means all ranks, as in Horovod.
        process_sets: sets of ranks to register, equal on all ranks. ``add_process_set()`` can always add more,
            so Horovod's value "dynamic" means none here.

    Raises:
        ConfigError: ``comm`` does not include this rank, a process set cannot be registered, or this process was forked
            from a rank. If no job of this size can register a set, the error is raised before the ranks connect.
        MismatchError: the ranks passed different process sets, or this rank of an elastic job cannot authenticate
            itself to the others.
        DeadlineExceededError: not all ranks called it within the configured ``start_timeout``.
        AuthenticationError: a peer does not know the job's secret.
    """
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ConfigError(f"process_sets={process_sets!r} is invalid; pass a list of process sets or 'dynamic'.")
    entries = () if process_sets is None or isinstance(process_sets, str) else process_sets
    if isinstance(comm, Sequence) and not comm:
        comm = None
    ranks = tuple(comm) if isinstance(comm, Sequence) else None
    with _session.lock:
        sets = [entry if isinstance(entry, ProcessSet) else ProcessSet(entry) for entry in entries]
        if _session.communicator is not None:
            _session.communicator.find_process_sets(sets)
            return
        if _session.context is None and (inherited := inherited_world()) is not None:
            _session.context, _session.variables = inherited.context, inherited.variables
            _session.publisher = None if inherited.commits is None else CommitPublisher(inherited.commits)
        _session.from_mpi = _comes_from_mpi(comm)
        if _session.forked and (_session.from_mpi or _session.context is not None):
            raise ConfigError(
                "This process was forked from a rank and cannot join the job in its place. Call hvd.init() in the "
                "rank's own process only."
            )
        context = _effective_context()
        if context is not None and context.membership is not None:
            communicator, server = _join_generation(context, comm, sets), None
        else:
            communicator, server = _connect_with_retries(comm, ranks, sets)
        _session.communicator = communicator
        _session.everybody.register(communicator.everybody)
        _session.everybody.mpi_comm = None if isinstance(comm, Sequence) else comm
        _session.server = server
        if not _session.watches_forks:
            _session.watches_forks = True
            os.register_at_fork(after_in_child=_leave_to_parent)
        if _session.joined is not None:
            _session.joined()


def _effective_context() -> LaunchContext | None:
    """Return the launcher's context with the settings that the program has changed in its environment since."""
    context = _session.context
    if context is None:
        return None
    return replace(context, config=with_changed_variables(context.config, _session.variables))


def _join_generation(
    context: LaunchContext,
    comm: Sequence[int] | MPI.Intracomm | None,
    sets: Sequence[ProcessSet],
) -> Communicator:
    """Connect this worker to the next generation of its elastic job whose members can all connect."""
    if comm is not None:
        raise ConfigError("hvd.init(comm=...) cannot select ranks of an elastic job, whose ranks change. Leave it out.")
    if _session.membership is None:
        _session.membership = Membership(context)
    membership = _session.membership
    refusals = 0
    while True:
        if refusals == _MAX_REFUSALS:
            raise MismatchError(
                f"This rank could not join {refusals} generations in a row, so the same error probably returns every "
                f"time: {membership.reason}. Check that nothing but this job answers at the addresses of its hosts."
            )
        current = replace(membership.next_generation(), config=context.config)
        # Only for messages: ``init()`` does not use this world to connect.
        _session.context = replace(_session.context or context, world=current.world)
        scope = scope_of(membership.generation)
        try:
            if current.config.log_level is not None:
                logging.getLogger("sparkhvd").setLevel(current.config.log_level)
            require_addable(sets, current.world.size)
            communicator = _open_communicator(current, scope, sets)
        except LOST_CONNECTIONS as error:  # a member was lost meanwhile: the driver forms another generation
            membership.reason = f"could not connect: {error}"
            refusals = refusals + 1 if isinstance(error, AuthenticationError) else 0
        else:
            _session.watch = _watch(membership, communicator, was_separated=current.answer_timeout is None)
            _session.inits[()] += 1
            return communicator


def _watch(membership: Membership, communicator: Communicator, *, was_separated: bool) -> GenerationWatch:
    """Watch a new generation; report first that hosts which were separated before reach each other."""
    try:
        if was_separated:
            membership.connected()
        return membership.watch(communicator.abort)
    except BaseException:
        communicator.close()
        raise


def membership() -> Membership | None:
    """Return this worker's membership in its elastic job; None in other jobs and before ``init()``."""
    return _session.membership


def publisher() -> CommitPublisher | None:
    """Return the publisher of this process's commits; None in jobs that keep them in memory only."""
    return _session.publisher


def _leave_to_parent() -> None:
    """Clean up in a forked child: the job belongs to the parent."""
    _session.lock = RLock()  # a thread of the parent may have held the lock
    if _session.communicator is not None:
        _session.forked = True
        _session.communicator.leave_to_parent()
        if _session.watch is not None:
            _session.watch.leave_to_parent()
            _session.watch = None


def _connect_with_retries(
    comm: Sequence[int] | MPI.Intracomm | None,
    ranks: tuple[int, ...] | None,
    sets: Sequence[ProcessSet],
) -> tuple[Communicator, RendezvousServer | None]:
    """Connect these ranks; skip an attempt that failed before this rank arrived."""
    job = _effective_context() or LaunchContext()
    require_addable(sets, _size_of_job(comm, ranks, job))
    index = job.world.rank if ranks is None else (*ranks, job.world.rank).index(job.world.rank)
    deadline = Deadline.after(job.config.start_timeout)
    while True:
        # MPI's ranks use a new rendezvous server each time.
        number = 1 if _session.from_mpi else _session.inits[ranks or ()] + 1
        scope, following = ("-".join(["init", str(n), *map(str, ranks or ())]) for n in (number, number + 1))
        try:
            if number > 1:
                _publish(job, f"{scope}/begun")
            connected = _connect_once(comm, ranks, scope, sets)
        except BaseException as error:
            _publish_absent_rank(job, error)
            # The other ranks are still waiting for a rank that failed before it published its address.
            if _session.from_mpi or not _is_known(job, f"{scope}/address/{index}", f"{scope}/connect-failure"):
                raise
            _session.inits[ranks or ()] = number
            if not _can_retry(error) or deadline.expired() or not _is_known(job, f"{following}/begun"):
                raise
        else:
            _session.inits[ranks or ()] = number
            return connected


def _size_of_job(comm: Sequence[int] | MPI.Intracomm | None, ranks: tuple[int, ...] | None, job: LaunchContext) -> int:
    """Return the number of ranks that ``init()`` connects."""
    if ranks is not None:
        return len(ranks)
    if not _session.from_mpi:
        return job.world.size
    return (mpi.world_communicator() if comm is None or isinstance(comm, Sequence) else comm).Get_size()


def _can_retry(error: BaseException) -> bool:
    """Return whether another attempt with the same arguments may succeed."""
    return isinstance(error, SparkHvdError) and not isinstance(error, ConfigError | MismatchError)


def _publish(context: LaunchContext, key: str, value: bytes = b"", seconds: float = math.inf) -> None:
    if context.rendezvous:
        deadline = Deadline.after(min(seconds, context.config.start_timeout))
        with RendezvousClient(context.rendezvous, context.token, deadline, encrypt=context.config.encrypt) as store:
            store.set(key, value, deadline)


def _publish_absent_rank(job: LaunchContext, error: BaseException) -> None:
    """Let the driver's error name the rank that ended without calling ``init()``, not this one, which waited for it."""
    absent = _ABSENT.search(str(error))
    if absent is None or not job.rendezvous:
        return
    straggler = Straggler(int(absent[1]), f"it ended while rank {job.world.rank} waited for it", joined=False)
    deadline = Deadline.after(_LOOKUP_SECONDS)
    with (
        suppress(SparkHvdError),  # the rendezvous has ended, so the job has an outcome
        RendezvousClient(job.rendezvous, job.token, deadline, encrypt=job.config.encrypt) as store,
    ):
        publish_straggler(store, straggler)


def _is_known(context: LaunchContext, *keys: str) -> bool:
    """Return whether one of ``keys`` is set in the rendezvous."""
    if not context.rendezvous:
        return False
    deadline = Deadline.after(_LOOKUP_SECONDS)
    try:
        with RendezvousClient(context.rendezvous, context.token, deadline, encrypt=context.config.encrypt) as store:
            for key in keys:
                try:
                    store.get(key, Deadline.after(_LOOKUP_SECONDS))
                except DeadlineExceededError:
                    continue
                return True
    except SparkHvdError:
        return False  # no rank can connect through it
    return False


def _connect_once(
    comm: Sequence[int] | MPI.Intracomm | None,
    ranks: tuple[int, ...] | None,
    scope: str,
    sets: Sequence[ProcessSet],
) -> tuple[Communicator, RendezvousServer | None]:
    context, server = _join_job(comm, ranks, scope)
    try:
        if context.config.log_level is not None:
            logging.getLogger("sparkhvd").setLevel(context.config.log_level)
        return _open_communicator(context, scope, sets), server
    except BaseException:
        if server is not None:
            server.close()
        raise


def _open_communicator(context: LaunchContext, scope: str, sets: Sequence[ProcessSet]) -> Communicator:
    communicator = Communicator(context, scope=scope)
    try:
        for process_set in sets:
            communicator.add_process_set(process_set)
    except BaseException:
        communicator.close()
        raise
    return communicator


def _comes_from_mpi(comm: object) -> bool:
    """Return whether the ranks come from MPI."""
    if comm is not None and not isinstance(comm, Sequence):
        return True
    return _session.context is None and mpirun_size() > 1


def _join_job(
    comm: Sequence[int] | MPI.Intracomm | None, ranks: tuple[int, ...] | None, scope: str
) -> tuple[LaunchContext, RendezvousServer | None]:
    """Return this process's launch context, and the rendezvous server that it owns, if any."""
    job = _effective_context() or LaunchContext(config=_own_config())
    if not _session.from_mpi:
        if _session.context is None:
            warn_if_horovod_rank()
        return (job if ranks is None else subset(job, ranks, scope)), None
    if comm is None:
        comm = mpi.world_communicator()
    return _session.agreements.reach(comm, job.config)


def _own_config() -> Config:
    warn_ignored_variables()
    return from_environment()


def shutdown() -> None:
    """Leave the job; does nothing when not initialized."""
    with _session.lock, ExitStack() as stack:  # closes all of them, even if Ctrl-C interrupts one
        for resource in (_session.server, _session.communicator, _session.watch):  # the last one is closed first
            if resource is not None:
                stack.callback(resource.close)
        _session.server = _session.communicator = _session.watch = None
        _session.everybody.register(None)


def leave_before_init() -> None:
    """Make the ranks that wait for this one in ``init()`` fail at once, unless this rank has called it.

    Launchers call this function once the rank's function has returned. If a program or child of this process has called
    ``init()`` in its place, no rank is waiting any more.
    """
    job = _session.context
    if job is None or job.membership is not None or job.world.size == 1 or _session.inits:
        return
    note = f"{_PEER_LOST}lost rank {job.world.rank}: {_NEVER_JOINED}"
    with suppress(SparkHvdError):  # the rendezvous has ended, so no rank is waiting
        _publish(job, f"{_FIRST_SCOPE}/connect-failure", note.encode(), _LEAVE_SECONDS)


def add_process_set(process_set: ProcessSet | Iterable[int] | MpiCommunicator) -> ProcessSet:
    """Register a set of ranks, see ``Communicator.add_process_set``; collective over all ranks."""
    return current().add_process_set(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Disconnect a set of ranks, see ``Communicator.remove_process_set``; collective over all ranks."""
    return current().remove_process_set(process_set)


def is_initialized() -> bool:
    """Return whether ``init()`` has been called and ``shutdown()`` has not."""
    return _session.communicator is not None


def uses_mpi() -> bool:
    """Return whether the ranks of this job come from MPI.

    Raises:
        NotInitializedError: before ``init()`` or after ``shutdown()``.
    """
    return current().world.size > 1 and _session.from_mpi


def current() -> Communicator:
    """Return the communicator that ``init()`` opened.

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
    """Publish this rank's progress, such as "epoch 2, step 17 of 40"; shown when other ranks wait for this one."""
    current().note_progress(text)


def stall_report() -> StallReport | None:
    """Return the latest report on a collective that took longer than ``stall_check_seconds``; None without one."""
    return current().stall_report()


def rank() -> int:
    """Return this process's number among all ranks, from 0."""
    return current().world.rank


def size() -> int:
    """Return the number of ranks."""
    return current().world.size


def local_rank() -> int:
    """Return this process's number among the ranks of its host, from 0."""
    return current().world.local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return current().world.local_size


def cross_rank() -> int:
    """Return this host's number among the hosts that have a rank with this local rank."""
    return current().world.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank."""
    return current().world.cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks."""
    return current().homogeneous
