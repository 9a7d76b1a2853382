"""Collectives on raw memory, for the framework adapters: methods of ``Communicator``.

All functions take a ``SubmitOptions``: the name, the ranks, and when to begin.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from sparkhvd._core import CoreError, Operation
from sparkhvd._util.counts import counted, is_count
from sparkhvd.comm.channel import Channel, HasChannels
from sparkhvd.comm.collectives.buffers import BYTES, Buffer, ReduceOp
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions
from sparkhvd.comm.failures import translate, translated
from sparkhvd.comm.handle import Handle, PendingGroup
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError, UnsupportedError

T = TypeVar("T")
Pairs = Sequence[tuple[Buffer, Buffer]]

_ANY = SubmitOptions()
_MEAN = Reduction()


@dataclass(frozen=True, slots=True)
class Gathered:
    """The result of an allgather or alltoall of raw memory.

    Attributes:
        content: the bytes of all ranks in rank order; empty for device memory.
        first_dims: the first dimension of the part from each rank.
        operation: holds the device memory.
    """

    content: memoryview
    first_dims: tuple[int, ...]
    operation: Operation = field(repr=False)

    def move_to(self, address: int, stream: int) -> None:
        """Copy the result on a device to ``address`` in its memory, in the order of ``stream``; works once."""
        with translated():
            self.operation.move_output(address, stream)


_MAX_ROWS = 2**63 - 1  # the core counts rows in 64 bits

# The error of the gradient of a reducescatter, whose rows would be incomplete.
MISSING_GRADIENTS = (
    "The gradient of a reducescatter needs the gradients of all ranks, but some ranks have joined. Compute the "
    "gradient before the first rank joins."
)


def rows_of(total: int, size: int) -> list[int]:
    """Return how a reducescatter divides ``total`` rows among ``size`` ranks: the first ranks get one more."""
    return [total // size + (rank < total % size) for rank in range(size)]


def reduce_buffer(
    me: HasChannels, source: Buffer, target: Buffer, reduction: Reduction = _MEAN, options: SubmitOptions = _ANY
) -> Handle[None]:
    """Start an allreduce of ``source`` into ``target`` of the same shape and dtype, which may be the same memory."""
    _require_same_form("An allreduce", source, target)
    channel = me.channel(options.process_set)
    return channel.handle(*_submit("allreduce", channel, source, target, reduction, options))


def reduce_in_place(  # noqa: PLR0917  most tensors come through here: records would cost more than the rest of the call
    me: HasChannels,
    address: int,
    shape: tuple[int, ...],
    dtype: str,
    owner: T,
    op: str,
    prescale: float,
    postscale: float,
    name: str | None,
    process_set: ProcessSet | None,
    with_waiter: bool,
) -> Handle[T]:
    """Start an allreduce in place; the result of the handle is the owner of the memory.

    The arguments are the fields of a ``Buffer``, a ``Reduction`` and a ``SubmitOptions``, one by one.
    """
    channel = me.channel(process_set)
    if name is None:
        name = channel.named("allreduce", None)
    try:
        operation = channel.engine.allreduce(
            name, address, address, shape, dtype, op, prescale, postscale, owner, with_waiter
        )
    except CoreError as error:
        raise translate(error) from None
    except TypeError:
        channel.named("allreduce", name)
        _require_numbers(prescale, postscale)
        raise
    return Handle(name, operation, channel.waits, owner)


def reduce_buffers(
    me: HasChannels, pairs: Pairs, reduction: Reduction = _MEAN, options: SubmitOptions = _ANY
) -> Handle[None]:
    """Start an allreduce of every source into its target; all run together, or none if the ranks disagree."""
    for source, target in pairs:
        _require_same_form("An allreduce", source, target)
    _require_apart([target for source, target in pairs if source.address == target.address], options.name)
    return _reduce_together("grouped_allreduce", me.channel(options.process_set), pairs, reduction, options)


def reducescatter_buffer(
    me: HasChannels, source: Buffer, target: Buffer, reduction: Reduction = _MEAN, options: SubmitOptions = _ANY
) -> Handle[None]:
    """Start a reduction of ``source`` whose first dimension is divided among the ranks, see ``rows_of``.

    ``target`` receives this rank's rows and must not overlap the source.
    """
    _require_elementwise(reduction)
    channel = me.channel(options.process_set)
    _require_own_rows(channel, source, target)
    return channel.handle(*_submit("reducescatter", channel, source, target, reduction, options))


def reducescatter_buffers(
    me: HasChannels, pairs: Pairs, reduction: Reduction = _MEAN, options: SubmitOptions = _ANY
) -> Handle[None]:
    """Start a reducescatter of every source into its target; all run together, or none if the ranks disagree."""
    _require_elementwise(reduction)
    channel = me.channel(options.process_set)
    for source, target in pairs:
        _require_own_rows(channel, source, target)
    return _reduce_together("grouped_reducescatter", channel, pairs, reduction, options)


def gather_buffer(me: HasChannels, source: Buffer, options: SubmitOptions = _ANY) -> Handle[Gathered]:
    """Start an allgather of ``source`` along its first dimension, which may differ between the ranks."""
    _require_rows(source, "An allgather", "concatenate")
    channel = me.channel(options.process_set)
    name = channel.named("allgather", options.name)
    with translated():
        operation = channel.engine.allgather(
            name, source.address, source.shape, source.dtype, source.owner, options.with_waiter, source.device
        )
    return channel.handle(name, operation, lambda: _gathered(operation))


def gather_buffers(me: HasChannels, sources: Sequence[Buffer], options: SubmitOptions = _ANY) -> Handle[list[Gathered]]:
    """Start an allgather of every source; all run together, or none if the ranks disagree."""
    for source in sources:
        _require_rows(source, "An allgather", "concatenate")
    channel = me.channel(options.process_set)
    name = channel.named("grouped_allgather", options.name)
    device = sources[0].device if sources else None
    with translated():
        tensors = _tensors(name, [(source, source) for source in sources])
        operations = channel.engine.grouped_allgather(name, tensors, options.with_waiter, device)
    return channel.handle(
        name, PendingGroup(tuple(operations)), lambda: [_gathered(operation) for operation in operations]
    )


def invalid_splits(splits: object) -> ConfigError:
    """Return the error for the ``splits`` of an alltoall that are not whole numbers, one per rank."""
    return ConfigError(f"splits must hold one number of rows, at least 0, per rank, got {splits!r:.300}.")


def alltoall_buffer(
    me: HasChannels, source: Buffer, splits: Sequence[int] | None = None, options: SubmitOptions = _ANY
) -> Handle[Gathered]:
    """Start sending a part of ``source`` to every rank.

    Args:
        me: the communicator.
        source: the rows for all ranks, in rank order; the number of rows may differ among ranks.
        splits: the number of rows for each rank; equal numbers if None.
        options: the name, the ranks, and when to begin.
    """
    _require_rows(source, "An alltoall", "divide")
    channel = me.channel(options.process_set)
    if splits is None:
        if source.shape[0] % channel.size:
            raise ConfigError(
                f"An alltoall of {counted(source.shape[0], 'row')} cannot be divided evenly among {channel.size} "
                "ranks; pass splits."
            )
        splits = [source.shape[0] // channel.size] * channel.size
    elif not all(is_count(rows, 0) and rows <= _MAX_ROWS for rows in splits):
        raise invalid_splits(list(splits))
    name = channel.named("alltoall", options.name)
    with translated():
        operation = channel.engine.alltoall(
            name,
            source.address,
            source.shape,
            [int(rows) for rows in splits],
            source.dtype,
            source.owner,
            options.with_waiter,
            source.device,
        )
    return channel.handle(name, operation, lambda: _gathered(operation))


def broadcast_buffer(
    me: HasChannels, source: Buffer, target: Buffer, root: int = 0, options: SubmitOptions = _ANY
) -> Handle[None]:
    """Start copying the ``source`` of rank ``root``, a rank of the job, into the ``target`` of all ranks."""
    _require_same_form("A broadcast", source, target)
    channel = me.channel(options.process_set)
    engine_root = channel.engine_rank_of(root)
    name = channel.named("broadcast", options.name)
    owners = (source.owner, target.owner)
    with translated():
        operation = channel.engine.broadcast(
            name,
            source.address,
            target.address,
            source.shape,
            source.dtype,
            engine_root,
            owners,
            options.with_waiter,
            source.device,
        )
    return channel.handle(name, operation)


def barrier_async(
    me: HasChannels, *, name: str | None = None, process_set: ProcessSet | None = None, with_waiter: bool = False
) -> Handle[None]:
    """Start a barrier: done once every rank has reached it."""
    channel = me.channel(process_set)
    name = channel.named("barrier", name)
    with translated():
        operation = channel.engine.barrier(name, with_waiter)
    return channel.handle(name, operation)


def join_async(
    me: HasChannels,
    *,
    process_set: ProcessSet | None = None,
    with_waiter: bool = False,
    device: tuple[int, int] | None = None,
) -> Handle[int]:
    """Start waiting for all ranks to join; the result is the last rank that joined.

    Until then, this rank takes part in the other ranks' collectives. It contributes zeros to their allreduces and
    reducescatters (or the neutral element of a minimum, maximum or product) and no rows to their allgathers. It also
    takes part in their barriers and in broadcasts whose root has not joined. An average divides by the number of all
    ranks.

    Other collectives fail with ``ConfigError`` on the ranks that call them. On devices, reducescatter and broadcast
    fail too. This rank takes part in collectives on devices with ``device``, as in ``Buffer``.
    """
    channel = me.channel(process_set)
    with translated():
        operation = channel.engine.join(with_waiter, device)
    # The ranks have submitted different numbers of operations. None of them is pending once all ranks have joined.
    channel.renumber()
    return channel.handle("join", operation, lambda: channel.ranks[operation.rows()[0]])


def _submit(  # noqa: PLR0917  keywords would cost a tenth of the call
    kind: Literal["allreduce", "reducescatter"],
    channel: Channel,
    source: Buffer,
    target: Buffer,
    reduction: Reduction,
    options: SubmitOptions,
) -> tuple[str, Operation]:
    name = channel.named(kind, options.name)
    engine = channel.engine
    submit = engine.allreduce if kind == "allreduce" else engine.reducescatter
    address, shape, dtype, owner, device = source
    op, prescale, postscale = reduction
    owners = owner if source is target else (owner, target.owner)
    try:
        operation = submit(
            name, address, target.address, shape, dtype, op, prescale, postscale, owners, options.with_waiter, device
        )
    except CoreError as error:
        raise translate(error) from None
    except TypeError:
        _require_numbers(prescale, postscale)
        raise
    return name, operation


def _reduce_together(
    kind: Literal["grouped_allreduce", "grouped_reducescatter"],
    channel: Channel,
    pairs: Pairs,
    reduction: Reduction,
    options: SubmitOptions,
) -> Handle[None]:
    name = channel.named(kind, options.name)
    engine = channel.engine
    submit = engine.grouped_allreduce if kind == "grouped_allreduce" else engine.grouped_reducescatter
    device = pairs[0][0].device if pairs else None
    try:
        operations = submit(name, _tensors(name, pairs), *reduction, options.with_waiter, device)
    except CoreError as error:
        raise translate(error) from None
    except TypeError:
        _require_numbers(reduction.prescale, reduction.postscale)
        raise
    return channel.handle(name, PendingGroup(tuple(operations)))


def _require_numbers(prescale: float, postscale: float) -> None:
    for name, scale in (("prescale", prescale), ("postscale", postscale)):
        if not isinstance(scale, numbers.Real):
            raise ConfigError(f"The {name} factor must be a number, got {scale!r}.")
        try:
            float(scale)
        except OverflowError:
            raise ConfigError(f"The {name} factor must be within the range of 64-bit floats.") from None


def _require_same_form(what: str, source: Buffer, target: Buffer) -> None:
    if source.shape != target.shape or source.dtype != target.dtype:
        raise ConfigError(
            f"{what} of {source.dtype}{list(source.shape)} cannot go into "
            f"{target.dtype}{list(target.shape)}; pass buffers of the same shape and dtype."
        )


def _require_apart(in_place: Sequence[Buffer], name: str | None) -> None:
    """Raise ``ConfigError`` if buffers that are reduced in place share memory, which would be reduced twice."""
    spans = sorted(
        (buffer.address, buffer.address + math.prod(buffer.shape) * BYTES[buffer.dtype], index)
        for index, buffer in enumerate(in_place)
    )
    end, previous_index = 0, 0
    for start, stop, index in spans:
        if start < end and stop > start:
            lower, upper = sorted((previous_index, index))
            group = "the group" if name is None else f"the group {name!r}"
            raise ConfigError(
                f"Tensors {lower} and {upper} of {group} share memory, which would be reduced twice in place. Pass "
                "each tensor once, or pass copies."
            )
        if stop > end:
            end, previous_index = stop, index


def _require_rows(source: Buffer, what: str, verb: str) -> None:
    if not source.shape:
        raise ConfigError(f"{what} needs at least one dimension to {verb} along; reshape the scalar to (1,).")


def _require_elementwise(reduction: Reduction) -> None:
    if reduction.op is ReduceOp.ADASUM:
        raise UnsupportedError("A reducescatter cannot use op=Adasum, which needs whole tensors; use an allreduce.")


def _require_own_rows(channel: Channel, source: Buffer, target: Buffer) -> None:
    _require_rows(source, "A reducescatter", "divide")
    rows = rows_of(source.shape[0], channel.size)[channel.engine.rank]
    shape = (rows, *source.shape[1:])
    if target.shape != shape or target.dtype != source.dtype:
        raise ConfigError(
            f"A reducescatter of {source.dtype}{list(source.shape)} gives this rank {source.dtype}{list(shape)}, "
            f"but the target is {target.dtype}{list(target.shape)}; pass one of the same shape and dtype."
        )


def _tensors(name: str, pairs: Pairs) -> list[tuple[str, int, int, tuple[int, ...], str, object]]:
    return [
        (f"{name}.{i}", source.address, target.address, source.shape, source.dtype, (source.owner, target.owner))
        for i, (source, target) in enumerate(pairs)
    ]


def _gathered(operation: Operation) -> Gathered:
    return Gathered(operation.output(), tuple(operation.rows()), operation)
