"""Collectives on numpy arrays: methods of ``Communicator``.

All functions take the keywords ``name``, ``process_set`` and ``with_waiter`` of ``options.SubmitOptions``. Reductions
also take ``prescale`` and ``postscale`` of ``Reduction``. Each collective has two forms: ``..._async`` returns
a ``Handle``, and the other returns the result. Waiting raises

- ``MismatchError`` on every rank when the ranks disagree,
- ``PeerLostError`` when a rank has ended,
- ``DeadlineExceededError`` when not all ranks took part in time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, Unpack

import numpy as np

from sparkhvd.comm.channel import HasChannels
from sparkhvd.comm.collectives import raw
from sparkhvd.comm.collectives.buffers import Array, ReduceOp, buffer_of
from sparkhvd.comm.collectives.options import ReduceKeywords, SubmitKeywords, SubmitOptions, reduction_options
from sparkhvd.comm.collectives.raw import Gathered
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError

C = TypeVar("C")
T = TypeVar("T")
P = ParamSpec("P")


def waited(start: Callable[Concatenate[C, P], Handle[T]]) -> Callable[Concatenate[C, P], T]:
    """Return the blocking form of the collective that ``start`` starts."""

    @wraps(start)
    def call(me: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        kwargs["with_waiter"] = True
        return start(me, *args, **kwargs).wait()

    return call


def allreduce_async(
    me: HasChannels,
    array: Array,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    out: Array | None = None,
    **options: Unpack[ReduceKeywords],
) -> Handle[Array]:
    """Combine the arrays of all ranks element by element; the result is the same on every rank.

    Args:
        me: the communicator.
        array: the same shape and dtype on all ranks.
        op: the reduction.
        out: receives the result, a new array by default; ``array`` itself works in place.
    """
    array = _contiguous(array)
    target = _result_array(array, out)
    handle = raw.reduce_buffer(
        me,
        buffer_of(array, "The array to reduce"),
        buffer_of(target, "The array for the result"),
        *reduction_options(op, **options),
    )
    return handle.with_result(target)


def grouped_allreduce_async(
    me: HasChannels, arrays: Sequence[Array], op: ReduceOp = ReduceOp.AVERAGE, **options: Unpack[ReduceKeywords]
) -> Handle[list[Array]]:
    """Allreduce several arrays that run together: all of them or, if the ranks disagree about one, none."""
    arrays = [_contiguous(array) for array in arrays]
    targets = [np.empty_like(array) for array in arrays]
    pairs = [
        (buffer_of(array, f"Array {i} to reduce"), buffer_of(target, "The array for the result"))
        for i, (array, target) in enumerate(zip(arrays, targets, strict=True))
    ]
    handle = raw.reduce_buffers(me, pairs, *reduction_options(op, **options))
    return handle.with_result(targets)


def reducescatter_async(
    me: HasChannels, array: Array, op: ReduceOp = ReduceOp.AVERAGE, **options: Unpack[ReduceKeywords]
) -> Handle[Array]:
    """Combine the arrays of all ranks; each rank gets its rows of the result.

    If the rows cannot be divided evenly, each of the first ranks gets one row more.

    Args:
        me: the communicator.
        array: the same shape and dtype on all ranks.
        op: the reduction.
    """
    array = _contiguous(array)
    target = _own_rows(me, array, options.get("process_set"))
    handle = raw.reducescatter_buffer(
        me,
        buffer_of(array, "The array to reduce"),
        buffer_of(target, "The array for the result"),
        *reduction_options(op, **options),
    )
    return handle.with_result(target)


def grouped_reducescatter_async(
    me: HasChannels, arrays: Sequence[Array], op: ReduceOp = ReduceOp.AVERAGE, **options: Unpack[ReduceKeywords]
) -> Handle[list[Array]]:
    """Reducescatter several arrays that run together: all of them or, if the ranks disagree about one, none."""
    arrays = [_contiguous(array) for array in arrays]
    targets = [_own_rows(me, array, options.get("process_set")) for array in arrays]
    pairs = [
        (buffer_of(array, f"Array {i} to reduce"), buffer_of(target, "The array for the result"))
        for i, (array, target) in enumerate(zip(arrays, targets, strict=True))
    ]
    handle = raw.reducescatter_buffers(me, pairs, *reduction_options(op, **options))
    return handle.with_result(targets)


def allgather_async(
    me: HasChannels,
    array: Array,
    **options: Unpack[SubmitKeywords],
) -> Handle[Array]:
    """Concatenate the arrays of all ranks along the first dimension, in rank order.

    Args:
        me: the communicator.
        array: the same dtype and shape on all ranks except for the first dimension.
    """
    array = _contiguous(array)
    handle = raw.gather_buffer(me, buffer_of(array, "The array to gather"), SubmitOptions(**options))
    return handle.then(lambda gathered: array_from(gathered, array))


def grouped_allgather_async(
    me: HasChannels,
    arrays: Sequence[Array],
    **options: Unpack[SubmitKeywords],
) -> Handle[list[Array]]:
    """Allgather several arrays that run together: all of them or, if the ranks disagree about one, none."""
    contiguous = [_contiguous(array) for array in arrays]
    sources = [buffer_of(array, f"Array {i} to gather") for i, array in enumerate(contiguous)]
    handle = raw.gather_buffers(me, sources, SubmitOptions(**options))
    return handle.then(lambda all_gathered: [array_from(*pair) for pair in zip(all_gathered, contiguous, strict=True)])


def alltoall_async(
    me: HasChannels,
    array: Array,
    splits: Sequence[int] | None = None,
    **options: Unpack[SubmitKeywords],
) -> Handle[tuple[Array, tuple[int, ...]]]:
    """Send some rows of the array to every rank; the result is the received rows, and how many came from each rank.

    Args:
        me: the communicator.
        array: the rows for all ranks, in rank order; the number of rows may differ among ranks.
        splits: the number of rows for each rank; equal numbers if None.
    """
    array = _contiguous(array)
    source = buffer_of(array, "The array to send")
    handle = raw.alltoall_buffer(me, source, splits, SubmitOptions(**options))
    return handle.then(lambda gathered: (array_from(gathered, array), gathered.first_dims))


def broadcast_async(
    me: HasChannels,
    array: Array,
    root: int = 0,
    *,
    out: Array | None = None,
    **options: Unpack[SubmitKeywords],
) -> Handle[Array]:
    """Send the array of rank ``root`` to every rank; all ranks pass arrays of the same shape and dtype.

    Args:
        me: the communicator.
        array: the values to send on the root; on other ranks only its shape and dtype matter.
        root: a rank of the job, even with a process set.
        out: receives the result, a new array by default; ``array`` itself works in place.
    """
    array = _contiguous(array)
    target = _result_array(array, out)
    source, destination = buffer_of(array, "The array to send"), buffer_of(target, "The array for the result")
    handle = raw.broadcast_buffer(me, source, destination, root, SubmitOptions(**options))
    return handle.with_result(target)


def _result_array(array: Array, out: Array | None) -> Array:
    if out is None:
        return np.empty_like(array)
    if not out.flags.writeable:  # the core would write into its memory anyway
        raise ConfigError("The array for the result is read-only; pass a writable one.")
    return out


def _own_rows(me: HasChannels, array: Array, process_set: ProcessSet | None) -> Array:
    channel = me.channel(process_set)
    rows = raw.rows_of(len(array), channel.size)[channel.engine.rank] if array.ndim else 0
    return np.empty((rows, *array.shape[1:]), array.dtype)


def array_from(gathered: Gathered, like: Array) -> Array:
    """Return the gathered rows of all ranks as an array; ``like`` is this rank's own."""
    joined: Array = np.frombuffer(gathered.content, like.dtype)
    return joined.reshape(sum(gathered.first_dims), *like.shape[1:])


def _contiguous(array: Array) -> Array:
    # numpy.ascontiguousarray would make a scalar one-dimensional.
    array = np.require(array, requirements="C")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))  # for the core
