"""Collectives on the calling thread, without negotiation: methods of ``Communicator``."""

from __future__ import annotations

import numpy as np

from sparkhvd._core import CoreError
from sparkhvd.comm.channel import HasChannels
from sparkhvd.comm.collectives import arrays
from sparkhvd.comm.collectives.buffers import Array, ReduceOp, refuse_mask
from sparkhvd.comm.failures import translate
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError

_allreduce = arrays.waited(arrays.allreduce_async)


def allreduce_now(
    me: HasChannels,
    array: Array,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    out: Array | None = None,
    process_set: ProcessSet | None = None,
) -> Array:
    """Combine the arrays of all ranks, like ``allreduce`` but without names and negotiation: the fastest call.

    The first call of a rank is matched with the first calls of the others, its second with their second, and so on. So
    every rank must make the same calls in the same order, one at a time. If the ranks do not all share memory,
    this function calls ``allreduce`` with a fixed name. This call and the other collectives of the communicator never
    wait for each other. The timeline does not record it.

    Args:
        me: the communicator.
        array: contiguous; the same length and dtype on all ranks.
        op: the reduction; not Adasum.
        out: receives the result, a new array by default; ``array`` itself works in place.
        process_set: the ranks that take part, all by default.

    Returns:
        The result, the same on every rank.

    Raises:
        ConfigError: an array is masked or not contiguous, or the core does not support its dtype.
        MismatchError: on every rank, if the ranks disagree; the communicator stays usable.
        PeerLostError: a rank has ended, or left a call through an exception such as ``KeyboardInterrupt``.
        DeadlineExceededError: not all ranks called it in time; the communicator has ended.
    """
    engine = me.channel(process_set).engine
    if not engine.has_direct_calls():
        return _allreduce(me, array, op, name="allreduce_now", out=out, process_set=process_set)
    refuse_mask(array, "The array to reduce")
    target = np.empty_like(array) if out is None else out
    refuse_mask(target, "The array for the result")
    try:
        engine.allreduce_now(array, target, op)
    except CoreError as error:
        raise translate(error) from None
    except (BufferError, ValueError) as error:
        raise ConfigError(
            f"The core cannot use this memory: {error}. Pass contiguous arrays; out must be writable."
        ) from error
    return target
