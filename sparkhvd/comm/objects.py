"""Collectives on Python objects, which cloudpickle serializes.

Received bytes are unpickled, so these are only for ranks of one job, whose links are authenticated. A class that a rank
already has keeps the attributes that it has there, whether it is pickled by value or by name.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar

import cloudpickle
import numpy as np

from sparkhvd._util.class_pickling import PeerPickler, dumps
from sparkhvd.comm.collectives.buffers import buffer_of
from sparkhvd.comm.collectives.options import SubmitOptions
from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import CollectiveError

T = TypeVar("T")

_NOT_PICKLED = -1
_NO_PICKLE = b"\0"  # every pickle is longer


def broadcast_object(
    communicator: Communicator,
    value: T,
    root: int = 0,
    *,
    name: str = "broadcast_object",
    process_set: ProcessSet | None = None,
) -> T:
    """Return the object of rank ``root`` on every rank; the values of other ranks are ignored.

    Args:
        communicator: the ranks that take part.
        value: any object that cloudpickle accepts.
        root: the rank whose object is sent.
        name: the operation's name, equal on all ranks.
        process_set: the ranks that take part, all by default.

    Raises:
        CollectiveError: on every rank, if the root's object cannot be pickled.
    """
    is_root = communicator.world.rank == root
    pickled, problem = _pickled(value) if is_root else (b"", None)
    size = np.array([_NOT_PICKLED if problem else len(pickled)], np.int64)
    announced = int(communicator.broadcast(size, root, name=f"{name}.size", process_set=process_set).item())
    if problem is not None:
        raise CollectiveError(f"Rank {root} cannot broadcast a {type(value).__name__}: {problem}") from problem
    if announced == _NOT_PICKLED:
        raise CollectiveError(f"Rank {root} could not pickle the object to broadcast; see the error on that rank.")
    payload = np.frombuffer(pickled, np.uint8) if is_root else np.empty(announced, np.uint8)
    received = communicator.broadcast(payload, root, name=f"{name}.content", process_set=process_set)
    return value if is_root else _unpickled(received.tobytes())


def allgather_object(
    communicator: Communicator, value: T, *, name: str = "allgather_object", process_set: ProcessSet | None = None
) -> list[T]:
    """Return the objects of all ranks, in rank order, on every rank.

    Args:
        communicator: the ranks that take part.
        value: any object that cloudpickle accepts.
        name: the operation's name, equal on all ranks.
        process_set: the ranks that take part, all by default.

    Raises:
        CollectiveError: on every rank, if an object cannot be pickled, or if a rank has joined; the message names the
            ranks.
    """
    pickled, problem = _pickled(value)
    payload = np.frombuffer(pickled or _NO_PICKLE, np.uint8)
    content = buffer_of(payload, "The pickled object")
    gathered = communicator.gather_buffer(content, SubmitOptions(name, process_set)).wait()
    if problem is not None:
        raise CollectiveError(f"A {type(value).__name__} cannot be sent to other ranks: {problem}") from problem
    ranks = communicator.channel(process_set).ranks
    sizes = dict(zip(ranks, gathered.first_dims, strict=True))
    if joined := [rank for rank, size in sizes.items() if size == 0]:
        raise CollectiveError(f"Ranks {joined} have joined, but gathering objects needs the objects of all ranks.")
    if failed := [rank for rank, size in sizes.items() if size == len(_NO_PICKLE)]:
        raise CollectiveError(f"Ranks {failed} could not pickle the objects to send; see the errors on those ranks.")
    ends = np.cumsum(gathered.first_dims).tolist()
    return [_unpickled(bytes(gathered.content[start:end])) for start, end in pairwise([0, *ends])]


def _pickled(value: object) -> tuple[bytes, Exception | None]:
    """Return the pickle of a value, or no bytes and the error: the other ranks wait for bytes in both cases."""
    try:
        return dumps(value, PeerPickler), None
    except Exception as problem:  # noqa: BLE001  a user's __reduce__ may raise anything
        return b"", problem


def _unpickled(pickled: bytes) -> T:  # type: ignore[type-var]
    return cloudpickle.loads(pickled)  # type: ignore[no-any-return]
