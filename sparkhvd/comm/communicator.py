"""Collectives over the compiled core, for numpy arrays and for raw memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Self, TypeVar

import numpy as np

from sparkhvd import _core
from sparkhvd.comm.buffers import Array, Buffer, ReduceOp, buffer_of
from sparkhvd.comm.doctor import HangDoctor
from sparkhvd.comm.failures import translated
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.launch_context import LaunchContext
from sparkhvd.comm.rendezvous import RendezvousClient
from sparkhvd.comm.stall_report import StallReport
from sparkhvd.comm.timeline import recording_name, timeline_path
from sparkhvd.deadline import Deadline
from sparkhvd.errors import ConfigError, NotInitializedError
from sparkhvd.world import World

T = TypeVar("T")

_CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Gathered:
    """What an allgather of raw memory brought.

    Attributes:
        content: the bytes of all ranks in rank order.
        first_dims: the first dimension that each rank contributed.
    """

    content: memoryview
    first_dims: tuple[int, ...]


class Communicator:
    """One rank's link to its peers, and the collectives over it.

    Construction connects to all peers and is collective; use it as a context manager, or ``close()`` it. All methods
    may be called from any thread. Every collective has a name by which the ranks match their submissions; where none is
    given one is made by counting, so all ranks must then submit unnamed operations of a kind in the same order.

    Args:
        context: the rank's place and the way to its peers.
        scope: tells apart the communicators that the ranks of one job open one after the other; equal on all ranks.

    Raises:
        ConfigError: more than one rank but no rendezvous address.
        AuthenticationError: a peer or the rendezvous server doesn't know the job's secret.
        DeadlineExceededError: not all ranks came within ``context.config.start_timeout``.
    """

    def __init__(self, context: LaunchContext, *, scope: str = "") -> None:
        self._world = context.world
        self._context = context
        self._scope = scope
        self._recordings = count()
        self._timeout = context.config.collective_timeout
        self._counts = {kind: count() for kind in ("allreduce", "allgather", "broadcast", "barrier")}
        deadline = Deadline.after(context.config.start_timeout)
        self._rendezvous = _connect(context, deadline)
        try:
            self._engine = _open_engine(context, scope, self._rendezvous, deadline)
        except BaseException:
            if self._rendezvous is not None:
                self._rendezvous.close()
            raise
        self._closed = False
        self._doctor: HangDoctor | None = None
        try:
            self._doctor = _doctor(context, scope, self._rendezvous, self._engine)
            if context.config.timeline:
                self.start_timeline(context.config.timeline, mark_cycles=context.config.timeline_mark_cycles)
            self._homogeneous = context.world.size == 1 or self._equal_on_all_ranks(context.world.local_size)
        except BaseException:
            self.close()
            raise

    @property
    def world(self) -> World:
        """This rank's place in the job."""
        return self._world

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._closed

    @property
    def homogeneous(self) -> bool:
        """Whether every host has the same number of ranks."""
        return self._homogeneous

    def counters(self) -> dict[str, int]:
        """Monotonic counts of what the core did, by name."""
        with translated():
            return self._engine.counters()

    def local_ranks(self) -> list[int]:
        """The ranks that this one shares memory with, itself included."""
        with translated():
            return self._engine.local_ranks()

    def start_timeline(self, path: str, *, mark_cycles: bool = False) -> None:
        """Record what happens to every tensor from now on, as a Chrome trace for Perfetto.

        Every rank that calls this takes part in the recording. The ranks of one host write one file, ``path`` on the
        host of rank 0 and, say, ``trace.rank-4.json`` on the host whose first rank is 4; see
        ``sparkhvd.comm.timeline.merge_timelines``.

        Args:
            path: the file; what it held before is replaced.
            mark_cycles: whether to show every cycle of the negotiation.

        Raises:
            ConfigError: a recording is on already.
            CollectiveError: the file cannot be written.
        """
        recording = recording_name(self._context.token, self._scope, next(self._recordings))
        with translated():
            self._engine.start_timeline(timeline_path(path, self._engine.host_ranks()), recording, mark_cycles)

    def stop_timeline(self) -> None:
        """End the recording and complete its file; does nothing when none is on.

        Raises:
            CollectiveError: not all events could be written.
        """
        with translated():
            self._engine.stop_timeline()

    def note_progress(self, text: str) -> None:
        """Say how far this rank's data is, such as "epoch 2, step 17 of 40"; shown when others wait for this rank."""
        if self._doctor is not None:
            self._doctor.note_progress(text)

    def stall_report(self) -> StallReport | None:
        """Who kept this rank waiting when a collective last took longer than ``stall_check_seconds``."""
        return None if self._doctor is None else self._doctor.last_report

    # Raw memory, for the framework adapters.

    def reduce_buffer(
        self,
        source: Buffer,
        target: Buffer,
        op: ReduceOp = ReduceOp.AVERAGE,
        *,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        with_waiter: bool = False,
    ) -> Handle[None]:
        """Start an allreduce of ``source`` into ``target``, which may be the same memory.

        Args:
            source: this rank's values.
            target: receives the result; shape and dtype of ``source``.
            op: the reduction.
            name: the operation's name, made by counting when None.
            prescale: multiplies the values before the reduction; equal on all ranks.
            postscale: multiplies the result; equal on all ranks.
            with_waiter: begin when the handle is waited for, on the thread that waits, which saves handing the
                operation over to another thread; for callers who wait at once.
        """
        if source.shape != target.shape or source.dtype != target.dtype:
            raise ConfigError(
                f"An allreduce of {source.dtype}{list(source.shape)} cannot go into "
                f"{target.dtype}{list(target.shape)}; give both the same shape and dtype."
            )
        name = self._name("allreduce", name)
        with translated():
            operation = self._open_engine().allreduce(
                name,
                source.address,
                target.address,
                source.shape,
                source.dtype,
                ReduceOp(op).value,
                prescale,
                postscale,
                (source.owner, target.owner),
                with_waiter,
            )
        return Handle(name, operation, self._timeout, _nothing)

    def gather_buffer(self, source: Buffer, *, name: str | None = None) -> Handle[Gathered]:
        """Start an allgather of ``source`` along its first dimension, which may differ between the ranks."""
        if not source.shape:
            raise ConfigError("An allgather needs at least one dimension to join along; reshape the scalar to (1,).")
        name = self._name("allgather", name)
        with translated():
            operation = self._open_engine().allgather(name, source.address, source.shape, source.dtype, source.owner)
        return Handle(name, operation, self._timeout, _gathered)

    def broadcast_buffer(
        self, source: Buffer, target: Buffer, root: int = 0, *, name: str | None = None
    ) -> Handle[None]:
        """Start copying the ``source`` of rank ``root`` into the ``target`` of all ranks."""
        if not 0 <= root < self._world.size:
            raise ConfigError(f"Root rank {root} is not among the {self._world.size} ranks 0..{self._world.size - 1}.")
        name = self._name("broadcast", name)
        with translated():
            operation = self._open_engine().broadcast(
                name,
                source.address,
                target.address,
                source.shape,
                source.dtype,
                root,
                (source.owner, target.owner),
            )
        return Handle(name, operation, self._timeout, _nothing)

    def barrier_async(self, *, name: str | None = None) -> Handle[None]:
        """Start a barrier."""
        name = self._name("barrier", name)
        with translated():
            operation = self._open_engine().barrier(name)
        return Handle(name, operation, self._timeout, _nothing)

    # numpy arrays.

    def allreduce_async(
        self,
        array: Array,
        op: ReduceOp = ReduceOp.AVERAGE,
        *,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Array | None = None,
    ) -> Handle[Array]:
        """Start an allreduce; see ``allreduce``."""
        return self._reduce(array, op, name=name, prescale=prescale, postscale=postscale, out=out, with_waiter=False)

    def allreduce(
        self,
        array: Array,
        op: ReduceOp = ReduceOp.AVERAGE,
        *,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Array | None = None,
    ) -> Array:
        """Combine the arrays of all ranks element by element.

        Args:
            array: the same shape and dtype on all ranks.
            op: the reduction.
            name: see the class.
            prescale: multiplies the values before the reduction; equal on all ranks.
            postscale: multiplies the result; equal on all ranks.
            out: receives the result, a new array by default; ``array`` itself works in place.

        Returns:
            The result, the same on every rank.

        Raises:
            MismatchError: on every rank, when they disagree.
            PeerLostError: a rank is gone.
            DeadlineExceededError: not all ranks took part in time.
        """
        return self._reduce(
            array, op, name=name, prescale=prescale, postscale=postscale, out=out, with_waiter=True
        ).wait()

    def allgather_async(self, array: Array, *, name: str | None = None) -> Handle[Array]:
        """Start an allgather; see ``allgather``."""
        array = _contiguous(array)
        dtype, rest = array.dtype, array.shape[1:]

        def join(gathered: Gathered) -> Array:
            joined: Array = np.frombuffer(gathered.content, dtype)
            return joined.reshape(sum(gathered.first_dims), *rest)

        return self.gather_buffer(buffer_of(array, "The array to gather"), name=name).then(join)

    def allgather(self, array: Array, *, name: str | None = None) -> Array:
        """Join the arrays of all ranks along the first dimension, in rank order.

        Args:
            array: the same dtype and shape on all ranks but for the first dimension.
            name: see the class.

        Raises:
            MismatchError: on every rank, when they disagree.
        """
        return self.allgather_async(array, name=name).wait()

    def broadcast_async(
        self, array: Array, root: int = 0, *, name: str | None = None, out: Array | None = None
    ) -> Handle[Array]:
        """Start a broadcast; see ``broadcast``."""
        array = _contiguous(array)
        target = np.empty_like(array) if out is None else out
        source, destination = buffer_of(array, "The array to send"), buffer_of(target, "The array for the result")
        return self.broadcast_buffer(source, destination, root, name=name).then(_always(target))

    def broadcast(self, array: Array, root: int = 0, *, name: str | None = None, out: Array | None = None) -> Array:
        """The array of rank ``root``, on every rank; all ranks pass one of its shape and dtype.

        Raises:
            MismatchError: on every rank, when they disagree.
        """
        return self.broadcast_async(array, root, name=name, out=out).wait()

    def barrier(self, *, name: str | None = None) -> None:
        """Return once every rank has called it."""
        self.barrier_async(name=name).wait()

    # The end.

    def abort(self, why: str) -> None:
        """End every pending and future operation, here and on all peers, with a ``PeerLostError`` that says ``why``."""
        with translated():
            self._engine.abort(why)

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Leave the job; peers that still need this rank get ``PeerLostError``. Closing twice is fine.

        Args:
            timeout: seconds for the way out.
        """
        if self._closed:
            return
        self._closed = True
        try:
            with translated():
                self._engine.shutdown(timeout)
                self._engine.stop_timeline()
        finally:
            if self._rendezvous is not None:
                self._rendezvous.close()
            if self._doctor is not None:
                self._doctor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._closed:
            self.abort(f"rank {self._world.rank} left with {type(error).__name__}: {error}")
        self.close()

    def _reduce(
        self,
        array: Array,
        op: ReduceOp,
        *,
        name: str | None,
        prescale: float,
        postscale: float,
        out: Array | None,
        with_waiter: bool,
    ) -> Handle[Array]:
        array = _contiguous(array)
        target = np.empty_like(array) if out is None else out
        handle = self.reduce_buffer(
            buffer_of(array, "The array to reduce"),
            buffer_of(target, "The array for the result"),
            op,
            name=name,
            prescale=prescale,
            postscale=postscale,
            with_waiter=with_waiter,
        )
        return handle.then(_always(target))

    def _name(self, kind: str, name: str | None) -> str:
        return f"{kind}.noname.{next(self._counts[kind])}" if name is None else name

    def _equal_on_all_ranks(self, number: int) -> bool:
        numbers = self.allgather(np.array([number]), name="communicator.local_size")
        return bool((numbers == number).all())

    def _open_engine(self) -> _core.Engine:
        if self._closed:
            raise NotInitializedError("This communicator is closed; open a new one (init() again) before a collective.")
        return self._engine


def _connect(context: LaunchContext, deadline: Deadline) -> RendezvousClient | None:
    if context.world.size == 1:
        return None
    if not context.rendezvous:
        raise ConfigError(
            f"Rank {context.world.rank} of {context.world.size} knows no rendezvous address; "
            "the launcher must give one."
        )
    return RendezvousClient(context.rendezvous, context.token, deadline)


def _doctor(
    context: LaunchContext, scope: str, rendezvous: RendezvousClient | None, engine: _core.Engine
) -> HangDoctor | None:
    wanted = context.config.stall_check and context.config.stall_check_seconds > 0
    if rendezvous is None or not wanted:
        return None
    return HangDoctor(engine, rendezvous, context.world, scope, context.config)


def _open_engine(
    context: LaunchContext, scope: str, rendezvous: RendezvousClient | None, deadline: Deadline
) -> _core.Engine:
    config = context.config
    with translated():
        return _core.Engine(
            context.world.rank,
            context.world.size,
            rendezvous=None if rendezvous is None else rendezvous.core,
            token=context.token,
            scope=scope,
            host_key=context.host_key,
            bind_host=context.bind_host,
            shared_memory=config.shared_memory,
            fusion_threshold=config.fusion_threshold,
            cache_capacity=config.cache_capacity,
            collective_timeout_s=config.collective_timeout,
            timeout_s=deadline.remaining(),
        )


def _contiguous(array: Array) -> Array:
    # numpy.ascontiguousarray would make a scalar one-dimensional.
    return np.require(array, requirements="C")


def _nothing(operation: _core.Operation) -> None:
    """The result of an operation that writes into the caller's memory."""


def _gathered(operation: _core.Operation) -> Gathered:
    return Gathered(operation.output(), tuple(operation.first_dims()))


def _always(value: T) -> Callable[[None], T]:
    return lambda _: value
