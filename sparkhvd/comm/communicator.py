"""Collectives over the compiled core, for numpy arrays and for raw memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from threading import Lock, get_ident
from types import TracebackType
from typing import NoReturn, Self

import numpy as np

from sparkhvd import _core
from sparkhvd.comm import nccl
from sparkhvd.comm.channel import Channel, connect_rendezvous, open_channel
from sparkhvd.comm.collectives import arrays, direct, raw
from sparkhvd.comm.collectives.buffers import buffer_of
from sparkhvd.comm.collectives.options import SubmitOptions
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.mpi import MpiCommunicator
from sparkhvd.comm.failures import translated
from sparkhvd.comm.process_sets import ProcessSet, Proposal, RegisteredSet, agreed_sets
from sparkhvd.comm.stall.detector import StallDetector
from sparkhvd.comm.stall.report import StallReport
from sparkhvd.comm.timeline import recording_name, timeline_path
from sparkhvd.deadline import Deadline
from sparkhvd.errors import ConfigError, MismatchError, NotInitializedError
from sparkhvd.world import World

_CLOSE_SECONDS = 10.0


class Communicator:
    """One rank's link to its peers, and the collectives over it.

    The constructor connects to all peers and is collective; use it as a context manager, or ``close()`` it. All methods
    may be called from any thread. Every collective has a name by which the ranks match their submissions. A
    collective without a name is numbered, so all ranks must submit their unnamed operations of a kind in the same
    order.

    Args:
        context: the rank's position in the job, and how to reach its peers.
        scope: distinguishes the communicators that the ranks of one job open one after the other; equal on all ranks.

    Raises:
        ConfigError: more than one rank but no rendezvous address.
        AuthenticationError: a peer or the rendezvous server does not know the job's secret.
        DeadlineExceededError: not all ranks called it within ``context.config.start_timeout``.
    """

    def __init__(self, context: LaunchContext, *, scope: str = "") -> None:
        self._world = context.world
        self._context = context
        self._scope = scope
        self._recordings = count()
        self.everybody = RegisteredSet(0, tuple(range(context.world.size)), context.world.rank)
        self._sets = {0: self.everybody.ranks}
        self._sets_lock = Lock()  # serializes changes of `_sets` and of the fields below
        self._next_set = 1  # counted equally on all ranks
        self._registered: list[ProcessSet] = []  # by this communicator
        self._device_libraries = nccl.libraries(context.config)
        deadline = Deadline.after(context.config.start_timeout)
        self._rendezvous = connect_rendezvous(context, deadline)
        try:
            world = open_channel(
                context,
                self.everybody.ranks,
                self._rendezvous,
                deadline,
                scope=scope,
                tuned=True,
                device_libraries=self._device_libraries,
            )
        except BaseException:
            if self._rendezvous is not None:
                self._rendezvous.close()
            raise
        self._engine = world.engine
        self._channels = {0: world}  # of the sets that contain this rank
        self._closed = False
        self._process = os.getpid()
        self._alone: tuple[int, str] | None = None  # the thread that is `alone`, and what it does
        self._stall_detector: StallDetector | None = None
        try:
            self._stall_detector = self._open_stall_detector()
            if context.config.timeline:
                self.start_timeline(context.config.timeline, mark_cycles=context.config.timeline_mark_cycles)
            self._homogeneous = context.world.size == 1 or self._is_equal_on_all_ranks(context.world.local_size)
        except BaseException:
            self.close()
            raise

    @property
    def world(self) -> World:
        """Return this rank's position in the job."""
        return self._world

    @property
    def closed(self) -> bool:
        """Return whether ``close()`` was called."""
        return self._closed

    @property
    def homogeneous(self) -> bool:
        """Return whether every host has the same number of ranks."""
        return self._homogeneous

    def counters(self, process_set: ProcessSet | None = None) -> dict[str, int]:
        """Return monotonic counters of the core's work among all ranks, or among those of ``process_set``, by name."""
        engine = self._engine if process_set is None else self.channel(process_set).engine
        with translated():
            return engine.counters()

    def tuning(self) -> dict[str, int]:
        """Return the current settings that autotuning may change, equal on all ranks; process sets are not tuned.

        ``fusion_threshold`` and ``hierarchical_allreduce`` are as in ``Config``. ``small_allreduce`` is the number of
        bytes of all ranks together up to which an allreduce in shared memory takes one step; ``allreduce_chunk`` is the
        size of the pieces of a larger one. ``searching`` is 1 as long as any of them may change.
        """
        with translated():
            return self._engine.tuning()

    def local_ranks(self) -> list[int]:
        """Return the ranks that share memory with this one, including this one."""
        with translated():
            return self._engine.local_ranks()

    def start_timeline(self, path: str, *, mark_cycles: bool = False) -> None:
        """Record what happens to every tensor from now on, as a Chrome trace for Perfetto.

        Every rank that calls this takes part in the recording. The ranks of one host write one file, ``path`` on the
        host of rank 0 and, for example, ``trace.rank-4.json`` on the host whose first rank is 4; see
        ``sparkhvd.comm.timeline.merge_timelines``.

        Args:
            path: the file; existing content is replaced.
            mark_cycles: whether to show every cycle of the negotiation.

        Raises:
            ConfigError: a recording is already running.
            CollectiveError: the file cannot be written.
        """
        recording = recording_name(self._context.token, self._scope, next(self._recordings))
        with translated():
            self._engine.start_timeline(timeline_path(path, self._engine.host_ranks()), recording, mark_cycles)

    def stop_timeline(self) -> None:
        """End the recording and complete its file; does nothing when none is running.

        Raises:
            CollectiveError: not all events could be written.
        """
        with translated():
            self._engine.stop_timeline()

    def note_progress(self, text: str) -> None:
        """Publish this rank's progress, such as "epoch 2, step 17 of 40"; shown when other ranks wait for this one."""
        if self._stall_detector is not None:
            self._stall_detector.note_progress(text)

    def stall_report(self) -> StallReport | None:
        """Return the latest report on a collective that took longer than ``stall_check_seconds``; None without one."""
        return None if self._stall_detector is None else self._stall_detector.last_report

    # Collectives on raw memory, for the framework adapters; see sparkhvd.comm.collectives.raw.

    reduce_buffer = raw.reduce_buffer
    reduce_in_place = raw.reduce_in_place
    reduce_buffers = raw.reduce_buffers
    reducescatter_buffer = raw.reducescatter_buffer
    reducescatter_buffers = raw.reducescatter_buffers
    gather_buffer = raw.gather_buffer
    gather_buffers = raw.gather_buffers
    alltoall_buffer = raw.alltoall_buffer
    broadcast_buffer = raw.broadcast_buffer
    barrier_async = raw.barrier_async
    join_async = raw.join_async
    barrier = arrays.waited(raw.barrier_async)
    join = arrays.waited(raw.join_async)

    # Collectives on numpy arrays; see sparkhvd.comm.collectives.arrays.

    allreduce_async = arrays.allreduce_async
    grouped_allreduce_async = arrays.grouped_allreduce_async
    reducescatter_async = arrays.reducescatter_async
    grouped_reducescatter_async = arrays.grouped_reducescatter_async
    allgather_async = arrays.allgather_async
    grouped_allgather_async = arrays.grouped_allgather_async
    alltoall_async = arrays.alltoall_async
    broadcast_async = arrays.broadcast_async
    allreduce = arrays.waited(arrays.allreduce_async)
    grouped_allreduce = arrays.waited(arrays.grouped_allreduce_async)
    reducescatter = arrays.waited(arrays.reducescatter_async)
    grouped_reducescatter = arrays.waited(arrays.grouped_reducescatter_async)
    allgather = arrays.waited(arrays.allgather_async)
    grouped_allgather = arrays.waited(arrays.grouped_allgather_async)
    alltoall = arrays.waited(arrays.alltoall_async)
    broadcast = arrays.waited(arrays.broadcast_async)

    allreduce_now = direct.allreduce_now

    # Process sets.

    def process_sets(self) -> dict[int, list[int]]:
        """Return the ranks of every process set, by its id."""
        return {number: list(ranks) for number, ranks in self._sets.items()}

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Refuse this thread's collectives inside ``with``, which runs on this rank only, so they would never end.

        Args:
            what: names the code in the error, such as "a checkpoint is saved".
        """
        self._alone = (get_ident(), what) if self._world.size > 1 else None
        try:
            yield
        finally:
            self._alone = None

    def channel(self, process_set: ProcessSet | None = None) -> Channel:
        """Return the channel to the ranks of ``process_set``, by default to all ranks.

        Raises:
            NotInitializedError: the communicator is closed, or the set is not registered.
            ConfigError: this rank is not in the set, or this thread is ``alone``.
        """
        if self._alone is not None and self._alone[0] == get_ident():
            raise ConfigError(
                f"A collective was called while {self._alone[1]} on rank {self._world.rank} only, so it would wait for "
                "the other ranks forever. Call it in a hook that runs on all ranks, such as one at the end of an "
                "epoch, and keep the result."
            )
        try:
            number = 0 if process_set is None else process_set.process_set_id
        except AttributeError:
            raise ConfigError(f"process_set must be an hvd.ProcessSet or None, got {process_set!r}.") from None
        channel = None if self._closed or number is None else self._channels.get(number)
        return self._raise_no_channel(process_set) if channel is None else channel

    def add_process_set(self, process_set: ProcessSet | Iterable[int] | MpiCommunicator) -> ProcessSet:
        """Connect some ranks, so that they can run collectives among themselves. Collective over all ranks of the job.

        Args:
            process_set: the set or its ranks; equal on all ranks of the job unless it is an MPI communicator.

        Returns:
            The set, registered.

        Raises:
            MismatchError: on every rank, if the ranks ask for different sets.
            DeadlineExceededError: a rank does not call it, or a member of an MPI communicator passes another one.
            ConfigError: on every rank, if the set already exists or one of its ranks is not in the job.
        """
        requested = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        with self._sets_lock:
            if requested.process_set_id is not None:
                raise ConfigError(f"{requested} is already registered.")
            given_ranks = requested.given_ranks
            proposals = self._exchange(Proposal(given_ranks or (), split=given_ranks is None))
            if all(proposal.split for proposal in proposals):  # all ranks have called: MPI would wait without a limit
                proposals = self._exchange(requested.proposal(self._world.rank, self._context.config.start_timeout))
            own_registration: RegisteredSet | None = None
            if self._next_set == 1 and self._channels[0].on_devices:
                self.barrier(name=_core.SHARE_DEVICE_NAME)
            for ranks in agreed_sets(proposals, self._sets, self._world.size):
                registration = RegisteredSet(self._next_set, ranks, self._world.rank)
                self._next_set += 1
                if self._world.rank in ranks:
                    self._channels[registration.number] = self._connect_set(registration)
                    own_registration = registration
                self._sets[registration.number] = ranks
                own_registration = own_registration or registration
            requested.register(own_registration)
            self._registered.append(requested)
        return requested

    def find_process_sets(self, process_sets: Sequence[ProcessSet]) -> None:
        """Register objects for process sets that already exist, without other ranks.

        An MPI communicator asks its members for their ranks.

        Raises:
            ConfigError: there is no set of the same ranks.
            DeadlineExceededError: a member of an MPI communicator does not call it within ``start_timeout``.
        """
        with self._sets_lock:
            numbers = {ranks: number for number, ranks in self._sets.items() if number != 0}
            missing = [
                (process_set, process_set.proposal(self._world.rank, self._context.config.start_timeout).ranks)
                for process_set in process_sets
                if process_set.process_set_id is None
            ]
            unknown = [process_set for process_set, ranks in missing if ranks not in numbers]
            if unknown:
                raise ConfigError(
                    f"A second init() cannot register new process sets, here {', '.join(map(str, unknown))}. Call "
                    "hvd.add_process_set() on all ranks, or hvd.shutdown() before hvd.init()."
                )
            for process_set, ranks in missing:
                process_set.register(RegisteredSet(numbers[ranks], ranks, self._world.rank))
                self._registered.append(process_set)

    def remove_process_set(self, process_set: ProcessSet) -> bool:
        """Disconnect a process set; its pending operations fail. Collective over all ranks of the job.

        Returns:
            Whether the set was registered; the set of all ranks stays.

        Raises:
            ConfigError: the argument is not a process set.
            MismatchError: on every rank, if the ranks remove different sets.
        """
        if not isinstance(process_set, ProcessSet):
            raise ConfigError(f"process_set must be an hvd.ProcessSet, got {process_set!r}.")
        number = process_set.process_set_id
        with self._sets_lock:
            numbers = self.allgather(np.array([-1 if number is None else number]), name="process_sets.remove")
            if (numbers != numbers[0]).any():
                raise MismatchError(f"All ranks must remove the same process set; they removed {numbers.tolist()}.")
            if number is None or number == 0 or number not in self._sets:
                return False
            del self._sets[number]
            channel = self._channels.pop(number, None)
            self._unregister(number)
            process_set.register(None)  # may be a copy of the object that was added
            if channel is not None:
                with translated():
                    channel.engine.shutdown(_CLOSE_SECONDS)
        return True

    def abort(self, why: str) -> None:
        """End all pending and future operations, here and on all peers, with a ``PeerLostError`` for this reason."""
        with translated():
            for channel in list(self._channels.values()):
                channel.engine.abort(why)

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Leave the job; peers that still need this rank get ``PeerLostError``. Closing twice is fine.

        The communicator's process sets are no longer registered afterwards, so another communicator can add them.

        Args:
            timeout: seconds to wait for the end of each engine; there is one per process set of this rank.

        Raises:
            DeadlineExceededError: an engine has not ended in time; the others are ended nevertheless.
        """
        if self._closed:
            return
        if self._process != os.getpid():
            self.leave_to_parent()
            return
        self._closed = True
        self._unregister()
        with ExitStack() as stack:  # takes every step, even if one fails; in reverse
            if self._stall_detector is not None:
                stack.callback(self._stall_detector.close)
            if self._rendezvous is not None:
                stack.callback(self._rendezvous.close)
            stack.enter_context(translated())
            stack.callback(self._engine.stop_timeline)
            for channel in self._channels.values():
                stack.callback(channel.engine.shutdown, timeout)

    def leave_to_parent(self) -> None:
        """Close a forked child's copies of the links, without notifying the parent's peers."""
        self._closed = True
        self._unregister()
        for channel in self._channels.values():
            channel.engine.close_copies()
        if self._rendezvous is not None:
            self._rendezvous.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._closed:
            self.abort(f"rank {self._world.rank} left with {type(error).__name__}: {error}")
        self.close()

    def _open_stall_detector(self) -> StallDetector | None:
        config = self._context.config
        if self._rendezvous is None or not config.stall_check or config.stall_check_seconds <= 0:
            return None
        return StallDetector(self._channels, self._sets, self._rendezvous, self._context, self._scope)

    def _is_equal_on_all_ranks(self, number: int) -> bool:
        numbers = self.allgather(np.array([number]), name="communicator.local_size")
        return bool((numbers == number).all())

    def _raise_no_channel(self, process_set: ProcessSet | None) -> NoReturn:
        if self._process != os.getpid():
            raise NotInitializedError(
                f"This process was forked from rank {self._world.rank} and is not a rank; use collectives in the "
                "rank's own process only."
            )
        if self._closed:
            raise NotInitializedError("This communicator is closed; call init() again before running collectives.")
        if process_set is None or process_set.process_set_id not in self._sets:
            raise NotInitializedError(
                f"{process_set} is not registered with this communicator; pass it to add_process_set()."
            )
        raise ConfigError(f"Rank {self._world.rank} is not in {process_set} and cannot run collectives on it.")

    def _exchange(self, own: Proposal) -> list[Proposal]:
        """Return the proposals of all ranks, in rank order."""
        content = np.array([own.split, *own.ranks], np.int64)
        gathered = self.gather_buffer(buffer_of(content, "The process set"), SubmitOptions("process_sets.add")).wait()
        numbers = np.frombuffer(gathered.content, np.int64)
        parts = np.split(numbers, np.cumsum(gathered.first_dims)[:-1])
        return [Proposal(tuple(part[1:].tolist()), bool(part[0])) for part in parts]

    def _unregister(self, number: int | None = None) -> None:
        """Make the objects of a process set unusable; without ``number``, the objects of all sets."""
        for process_set in self._registered:
            if number in {None, process_set.process_set_id}:
                process_set.register(None)
        self._registered = [registered for registered in self._registered if registered.process_set_id is not None]

    def _connect_set(self, registration: RegisteredSet) -> Channel:
        number, ranks = registration.number, registration.ranks
        return open_channel(
            self._context,
            ranks,
            self._rendezvous,
            Deadline.after(self._context.config.start_timeout),
            scope=f"{self._scope}/process-set-{number}",
            parent=(self._channels[0], f"process set {number}"),
            device_libraries=self._device_libraries,
            label=f"process set {number}, whose ranks 0..{len(ranks) - 1} are ranks {list(ranks)} of the job",
        )
