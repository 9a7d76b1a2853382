"""The collectives on arrays.

An array is any value that NumPy can read: its own arrays, numbers, lists, and objects with the buffer protocol,
``__array__`` or DLPack, such as arrays of JAX, CuPy and Arrow. Results are NumPy arrays. All functions raise
``ConfigError`` for values that NumPy cannot read. Waiting for a result raises

- ``MismatchError`` on every rank when the ranks disagree on shape, dtype, operation or root,
- ``PeerLostError`` when a rank has ended,
- ``DeadlineExceededError`` when not all ranks took part in time.

``with_waiter`` lets an operation begin only when a thread waits for its handle. The operation then runs on that thread,
which saves a context switch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import Array, ReduceOp, buffer_of, label_of
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions
from sparkhvd.comm.collectives.raw import invalid_splits
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError
from sparkhvd.numpy.arrays import Writable, array_of, writable_array_of

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W", bound=Writable)


def _waited(start: Callable[P, Handle[R]]) -> Callable[P, R]:
    """Return the blocking form of the collective that ``start`` starts."""

    @wraps(start)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return start(*args, **{"with_waiter": True, **kwargs}).wait()  # type: ignore[arg-type]

    run.__name__ = run.__qualname__ = start.__name__.replace("_async", "")
    signature = inspect.signature(start)
    result = str(signature.return_annotation).removeprefix("Handle[").removesuffix("]")
    cast("Any", run).__signature__ = signature.replace(return_annotation=result)
    return run


def allreduce_async(
    array: npt.ArrayLike,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    with_waiter: bool = False,
) -> Handle[Array]:
    """Combine the arrays of all ranks element by element; the result is the same on every rank.

    It has the dtype of the arrays, so an average of integers is truncated towards zero.

    Args:
        array: the same shape and dtype on all ranks.
        name: the operation's name, equal on all ranks; numbered automatically when None.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the result; equal on all ranks.
        process_set: the ranks that take part, all by default.
        with_waiter: whether to begin only when a thread waits.
    """
    return session.current().allreduce_async(
        array_of(array, label_of("Array", name)),
        ReduceOp(op),
        prescale=prescale_factor,
        postscale=postscale_factor,
        name=name,
        process_set=process_set,
        with_waiter=with_waiter,
    )


def allreduce_async_(
    array: W,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    with_waiter: bool = False,
) -> Handle[W]:
    """Run ``allreduce`` in place; the result is ``array`` itself.

    Args:
        array: a contiguous and writable NumPy array, or another object with such a buffer.
        name: as in ``allreduce``, as are the arguments below.
        op: the reduction.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.
        with_waiter: whether to begin only when a thread waits.
    """
    memory = writable_array_of(array, label_of("Array", name))
    handle = session.current().allreduce_async(
        memory,
        ReduceOp(op),
        out=memory,
        prescale=prescale_factor,
        postscale=postscale_factor,
        name=name,
        process_set=process_set,
        with_waiter=with_waiter,
    )
    return handle.with_result(array)


def grouped_allreduce_async(
    arrays: Sequence[npt.ArrayLike],
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    with_waiter: bool = False,
) -> Handle[list[Array]]:
    """Combine several arrays of all ranks in one operation, which runs once all ranks have submitted all of them.

    Args:
        arrays: the same number of arrays, with the same shapes and dtypes, on all ranks.
        name: the group's name, equal on all ranks; numbered automatically when None.
        op: as in ``allreduce``, as are the arguments below.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the results.
        process_set: the ranks that take part.
        with_waiter: whether to begin only when a thread waits.
    """
    return session.current().grouped_allreduce_async(
        _group(arrays, name),
        ReduceOp(op),
        prescale=prescale_factor,
        postscale=postscale_factor,
        name=name,
        process_set=process_set,
        with_waiter=with_waiter,
    )


def grouped_allreduce_async_(
    arrays: Sequence[W],
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    with_waiter: bool = False,
) -> Handle[list[W]]:
    """Run ``grouped_allreduce`` in place; the result is a list of the arrays themselves.

    Args:
        arrays: contiguous and writable NumPy arrays, or other objects with such buffers.
        name: as in ``grouped_allreduce``, as are the arguments below.
        op: the reduction.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the results.
        process_set: the ranks that take part.
        with_waiter: whether to begin only when a thread waits.
    """
    buffers = [buffer_of(writable_array_of(array, label), label) for label, array in _labelled(arrays, name)]
    handle = session.current().reduce_buffers(
        [(buffer, buffer) for buffer in buffers],
        Reduction(ReduceOp(op), prescale_factor, postscale_factor),
        SubmitOptions(name, process_set, with_waiter),
    )
    return handle.with_result(list(arrays))


def reducescatter_async(
    array: npt.ArrayLike,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    with_waiter: bool = False,
) -> Handle[Array]:
    """Combine the arrays of all ranks element by element; the result is this rank's part of the rows.

    The first dimension is split as evenly as possible; the first ranks get one more row.

    Args:
        array: the same shape and dtype on all ranks, of at least one dimension.
        name: the operation's name, equal on all ranks; numbered automatically when None.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the result; equal on all ranks.
        process_set: the ranks that take part, all by default.
        with_waiter: whether to begin only when a thread waits.
    """
    return session.current().reducescatter_async(
        array_of(array, label_of("Array", name)),
        ReduceOp(op),
        prescale=prescale_factor,
        postscale=postscale_factor,
        name=name,
        process_set=process_set,
        with_waiter=with_waiter,
    )


def grouped_reducescatter_async(
    arrays: Sequence[npt.ArrayLike],
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    with_waiter: bool = False,
) -> Handle[list[Array]]:
    """Reduce and scatter several arrays in one operation; see ``reducescatter``.

    Args:
        arrays: the same number of arrays, with the same shapes and dtypes, on all ranks.
        name: the group's name, equal on all ranks; numbered automatically when None.
        op: as in ``reducescatter``, as are the arguments below.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the results.
        process_set: the ranks that take part.
        with_waiter: whether to begin only when a thread waits.
    """
    return session.current().grouped_reducescatter_async(
        _group(arrays, name),
        ReduceOp(op),
        prescale=prescale_factor,
        postscale=postscale_factor,
        name=name,
        process_set=process_set,
        with_waiter=with_waiter,
    )


def allgather_async(
    array: npt.ArrayLike,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    *,
    with_waiter: bool = False,
) -> Handle[Array]:
    """Concatenate the arrays of all ranks along the first dimension, in rank order.

    Args:
        array: the same dtype and shape on all ranks, except for the first dimension.
        name: the operation's name, equal on all ranks; numbered automatically when None.
        process_set: the ranks that take part, all by default.
        with_waiter: whether to begin only when a thread waits.
    """
    return session.current().allgather_async(
        array_of(array, label_of("Array", name)), name=name, process_set=process_set, with_waiter=with_waiter
    )


def grouped_allgather_async(
    arrays: Sequence[npt.ArrayLike],
    name: str | None = None,
    process_set: ProcessSet | None = None,
    *,
    with_waiter: bool = False,
) -> Handle[list[Array]]:
    """Gather several arrays in one operation; see ``allgather``.

    Args:
        arrays: the same number on all ranks, with the same dtypes, and the same shapes except for the first dimension.
        name: the group's name, equal on all ranks; numbered automatically when None.
        process_set: the ranks that take part, all by default.
        with_waiter: whether to begin only when a thread waits.
    """
    return session.current().grouped_allgather_async(
        _group(arrays, name), name=name, process_set=process_set, with_waiter=with_waiter
    )


def broadcast_async(
    array: npt.ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    *,
    with_waiter: bool = False,
) -> Handle[Array]:
    """Return the array of ``root_rank`` on every rank.

    Args:
        array: the same shape and dtype on all ranks.
        root_rank: the rank whose array is sent, numbered in the whole job.
        name: the operation's name, equal on all ranks; numbered automatically when None.
        process_set: the ranks that take part, all by default.
        with_waiter: whether to begin only when a thread waits.
    """
    values = array_of(array, label_of("Array", name))
    return session.current().broadcast_async(
        values, root_rank, name=name, process_set=process_set, with_waiter=with_waiter
    )


def broadcast_async_(
    array: W,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    *,
    with_waiter: bool = False,
) -> Handle[W]:
    """Overwrite the array with that of ``root_rank``; the result is ``array`` itself.

    Args:
        array: a contiguous and writable NumPy array, or another object with such a buffer.
        root_rank: the rank whose array is sent, numbered in the whole job.
        name: the operation's name, equal on all ranks; numbered automatically when None.
        process_set: the ranks that take part, all by default.
        with_waiter: whether to begin only when a thread waits.
    """
    memory = writable_array_of(array, label_of("Array", name))
    handle = session.current().broadcast_async(
        memory, root_rank, out=memory, name=name, process_set=process_set, with_waiter=with_waiter
    )
    return handle.with_result(array)


def alltoall_async(
    array: npt.ArrayLike,
    splits: Sequence[int] | Array | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    *,
    with_waiter: bool = False,
) -> Handle[Array | tuple[Array, Array]]:
    """Send some rows of the array to every rank, and concatenate the rows received from all ranks, in rank order.

    With ``splits`` the result is a pair: the received rows, and an int64 array with their number from each rank.

    Args:
        array: rows for all ranks, in rank order; the same dtype and shape on all ranks but for the first dimension.
        splits: the number of rows for each rank; equal numbers when None.
        name: the operation's name, equal on all ranks; numbered automatically when None.
        process_set: the ranks that take part, all by default.
        with_waiter: whether to begin only when a thread waits.
    """
    counts = None if splits is None else _row_counts(splits)
    handle = session.current().alltoall_async(
        array_of(array, label_of("Array", name)), counts, name=name, process_set=process_set, with_waiter=with_waiter
    )
    return handle.then(lambda received: received[0] if splits is None else (received[0], np.array(received[1])))


allreduce = _waited(allreduce_async)
allreduce_ = _waited(allreduce_async_)
grouped_allreduce = _waited(grouped_allreduce_async)
grouped_allreduce_ = _waited(grouped_allreduce_async_)
reducescatter = _waited(reducescatter_async)
grouped_reducescatter = _waited(grouped_reducescatter_async)
allgather = _waited(allgather_async)
grouped_allgather = _waited(grouped_allgather_async)
broadcast = _waited(broadcast_async)
broadcast_ = _waited(broadcast_async_)
alltoall = _waited(alltoall_async)


def barrier(process_set: ProcessSet | None = None) -> None:
    """Return once every rank of the process set (all ranks by default) has called it."""
    session.current().barrier(process_set=process_set)


def join(process_set: ProcessSet | None = None) -> int:
    """Announce that this rank has no more data, and wait until all ranks have joined.

    While it waits, this rank takes part in the other ranks' allreduces and reducescatters with zeros (an average still
    divides by the number of all ranks), in their allgathers without rows, in their barriers, and in broadcasts of a
    root that has not joined. Other collectives fail.

    Args:
        process_set: the ranks that take part, all by default.

    Returns:
        The rank that joined last.
    """
    return session.current().join(process_set=process_set)


def _row_counts(splits: Sequence[int] | Array) -> list[int]:
    try:
        counts: list[int] = np.asarray(splits).ravel().tolist()
    except ValueError:
        raise invalid_splits(splits) from None
    return counts


def _labelled(arrays: Sequence[A], name: str | None) -> list[tuple[str, A]]:
    """Return the arrays of a group, each with its label in error messages."""
    if not isinstance(arrays, list | tuple) or not arrays:
        raise ConfigError("A grouped collective takes a list of at least one array; pass a list.")
    group = "the group" if name is None else f"the group {name!r}"
    return [(f"Array {index} of {group}", array) for index, array in enumerate(arrays)]


def _group(arrays: Sequence[npt.ArrayLike], name: str | None) -> list[Array]:
    return [array_of(array, label) for label, array in _labelled(arrays, name)]
