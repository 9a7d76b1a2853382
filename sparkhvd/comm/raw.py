"""Collectives on raw memory, for the framework adapters: methods of ``Communicator``.

All take

- a ``name`` by which the ranks match their submissions, made by counting when None;
- a ``process_set``, all ranks by default;
- ``with_waiter``: begin when the handle is waited for, on the thread that waits, which saves handing the operation over
  to another thread; for callers who wait at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkhvd._core import Operation
from sparkhvd.comm.buffers import Buffer, ReduceOp
from sparkhvd.comm.channel import Channel, HasChannels
from sparkhvd.comm.failures import translated
from sparkhvd.comm.handle import Handle, PendingGroup
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Gathered:
    """What an allgather or alltoall of raw memory brought.

    Attributes:
        content: the bytes of all ranks in rank order.
        first_dims: the first dimension of what came from each rank.
    """

    content: memoryview
    first_dims: tuple[int, ...]


def rows_of(total: int, size: int) -> list[int]:
    """How a reducescatter divides ``total`` rows among ``size`` ranks: the first ones get one more."""
    return [total // size + (rank < total % size) for rank in range(size)]


def reduce_buffer(
    me: HasChannels,
    source: Buffer,
    target: Buffer,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet | None = None,
    with_waiter: bool = False,
) -> Handle[None]:
    """Start an allreduce of ``source`` into ``target``, which may be the same memory.

    Args:
        me: the communicator.
        source: this rank's values.
        target: receives the result; shape and dtype of ``source``.
        op: the reduction.
        name: the operation's name.
        prescale: multiplies this rank's values before the reduction; may differ among ranks.
        postscale: multiplies the result; equal on all ranks.
        process_set: the ranks that take part.
        with_waiter: see above.
    """
    _require_same_form(source, target)
    channel = me.channel(process_set)
    name = channel.named("allreduce", name)
    with translated():
        operation = channel.engine.allreduce(
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
    return channel.handle(name, operation, _nothing)


def reduce_buffers(
    me: HasChannels,
    pairs: Sequence[tuple[Buffer, Buffer]],
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet | None = None,
    with_waiter: bool = False,
) -> Handle[None]:
    """Start an allreduce of every source into its target; all run together, or none where the ranks disagree."""
    for source, target in pairs:
        _require_same_form(source, target)
    channel = me.channel(process_set)
    name = channel.named("grouped_allreduce", name)
    with translated():
        operations = channel.engine.grouped_allreduce(
            name, _tensors(name, pairs), ReduceOp(op).value, prescale, postscale, with_waiter
        )
    return channel.handle(name, PendingGroup(tuple(operations)), _nothing)


def reducescatter_buffer(
    me: HasChannels,
    source: Buffer,
    target: Buffer,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet | None = None,
    with_waiter: bool = False,
) -> Handle[None]:
    """Start a reduction of ``source`` whose first dimension is divided among the ranks, see ``rows_of``.

    Args:
        me: the communicator.
        source: this rank's values.
        target: receives this rank's rows; must not overlap the source.
        op: the reduction.
        name: the operation's name.
        prescale: multiplies this rank's values before the reduction; may differ among ranks.
        postscale: multiplies the result; equal on all ranks.
        process_set: the ranks that take part.
        with_waiter: see above.
    """
    channel = me.channel(process_set)
    _require_own_rows(channel, source, target)
    name = channel.named("reducescatter", name)
    with translated():
        operation = channel.engine.reducescatter(
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
    return channel.handle(name, operation, _nothing)


def reducescatter_buffers(
    me: HasChannels,
    pairs: Sequence[tuple[Buffer, Buffer]],
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet | None = None,
    with_waiter: bool = False,
) -> Handle[None]:
    """Start a reducescatter of every source into its target; all run together, or none where the ranks disagree."""
    channel = me.channel(process_set)
    for source, target in pairs:
        _require_own_rows(channel, source, target)
    name = channel.named("grouped_reducescatter", name)
    with translated():
        operations = channel.engine.grouped_reducescatter(
            name, _tensors(name, pairs), ReduceOp(op).value, prescale, postscale, with_waiter
        )
    return channel.handle(name, PendingGroup(tuple(operations)), _nothing)


def gather_buffer(
    me: HasChannels,
    source: Buffer,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    with_waiter: bool = False,
) -> Handle[Gathered]:
    """Start an allgather of ``source`` along its first dimension, which may differ between the ranks."""
    _require_rows(source, "An allgather", "join")
    channel = me.channel(process_set)
    name = channel.named("allgather", name)
    with translated():
        operation = channel.engine.allgather(
            name, source.address, source.shape, source.dtype, source.owner, with_waiter
        )
    return channel.handle(name, operation, lambda: _gathered(operation))


def gather_buffers(
    me: HasChannels,
    sources: Sequence[Buffer],
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    with_waiter: bool = False,
) -> Handle[list[Gathered]]:
    """Start an allgather of every source; all run together, or none where the ranks disagree."""
    for source in sources:
        _require_rows(source, "An allgather", "join")
    channel = me.channel(process_set)
    name = channel.named("grouped_allgather", name)
    with translated():
        operations = channel.engine.grouped_allgather(
            name, _tensors(name, [(source, source) for source in sources]), with_waiter
        )
    return channel.handle(
        name, PendingGroup(tuple(operations)), lambda: [_gathered(operation) for operation in operations]
    )


def alltoall_buffer(
    me: HasChannels,
    source: Buffer,
    splits: Sequence[int] | None = None,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    with_waiter: bool = False,
) -> Handle[Gathered]:
    """Start sending a part of ``source`` to every rank.

    Args:
        me: the communicator.
        source: the rows for all ranks, in rank order; the number of rows may differ among ranks.
        splits: how many rows go to each rank; equal numbers when None.
        name: the operation's name.
        process_set: the ranks that take part.
        with_waiter: see above.
    """
    _require_rows(source, "An alltoall", "divide")
    channel = me.channel(process_set)
    if splits is None:
        if source.shape[0] % channel.size:
            raise ConfigError(
                f"An alltoall of {source.shape[0]} rows cannot be divided evenly among {channel.size} ranks; "
                "give splits."
            )
        splits = [source.shape[0] // channel.size] * channel.size
    name = channel.named("alltoall", name)
    with translated():
        operation = channel.engine.alltoall(
            name, source.address, source.shape, list(splits), source.dtype, source.owner, with_waiter
        )
    return channel.handle(name, operation, lambda: _gathered(operation))


def broadcast_buffer(
    me: HasChannels,
    source: Buffer,
    target: Buffer,
    root: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    with_waiter: bool = False,
) -> Handle[None]:
    """Start copying the ``source`` of rank ``root``, a rank of the job, into the ``target`` of all ranks."""
    channel = me.channel(process_set)
    place = channel.place_of(root)
    name = channel.named("broadcast", name)
    with translated():
        operation = channel.engine.broadcast(
            name,
            source.address,
            target.address,
            source.shape,
            source.dtype,
            place,
            (source.owner, target.owner),
            with_waiter,
        )
    return channel.handle(name, operation, _nothing)


def barrier_async(
    me: HasChannels, *, name: str | None = None, process_set: ProcessSet | None = None, with_waiter: bool = False
) -> Handle[None]:
    """Start a barrier: done once every rank has come to it."""
    channel = me.channel(process_set)
    name = channel.named("barrier", name)
    with translated():
        operation = channel.engine.barrier(name, with_waiter)
    return channel.handle(name, operation, _nothing)


def join_async(me: HasChannels, *, process_set: ProcessSet | None = None, with_waiter: bool = False) -> Handle[int]:
    """Start waiting for all ranks to join; the result is the last rank that did.

    Until then this rank takes part in what the others still do: it contributes zeros (the neutral element of a minimum,
    maximum or product) to their allreduces, no rows to their allgathers, and passes their barriers. An average divides
    by the number of all ranks. Other collectives fail with ``ConfigError`` on the ranks that call them.
    """
    channel = me.channel(process_set)
    with translated():
        operation = channel.engine.join(with_waiter)
    return channel.handle("join", operation, lambda: channel.ranks[operation.rows()[0]])


def _require_same_form(source: Buffer, target: Buffer) -> None:
    if source.shape != target.shape or source.dtype != target.dtype:
        raise ConfigError(
            f"An allreduce of {source.dtype}{list(source.shape)} cannot go into "
            f"{target.dtype}{list(target.shape)}; give both the same shape and dtype."
        )


def _require_rows(source: Buffer, what: str, verb: str) -> None:
    if not source.shape:
        raise ConfigError(f"{what} needs at least one dimension to {verb} along; reshape the scalar to (1,).")


def _require_own_rows(channel: Channel, source: Buffer, target: Buffer) -> None:
    _require_rows(source, "A reducescatter", "divide")
    rows = rows_of(source.shape[0], channel.size)[channel.engine.rank]
    shape = (rows, *source.shape[1:])
    if target.shape != shape or target.dtype != source.dtype:
        raise ConfigError(
            f"A reducescatter of {source.dtype}{list(source.shape)} brings this rank {source.dtype}{list(shape)}, "
            f"which cannot go into {target.dtype}{list(target.shape)}."
        )


def _tensors(
    name: str, pairs: Sequence[tuple[Buffer, Buffer]]
) -> list[tuple[str, int, int, tuple[int, ...], str, object]]:
    return [
        (f"{name}.{i}", source.address, target.address, source.shape, source.dtype, (source.owner, target.owner))
        for i, (source, target) in enumerate(pairs)
    ]


def _nothing() -> None:
    """The result of an operation that writes into the caller's memory."""


def _gathered(operation: Operation) -> Gathered:
    return Gathered(operation.output(), tuple(operation.rows()))
