"""The interface that all frameworks share: the job and its ranks, process sets, reductions, the timeline.

``sparkhvd.torch``, ``sparkhvd.tensorflow``, ``sparkhvd.keras`` and ``sparkhvd.numpy`` re-export all of it and add
their own functions.
"""

from __future__ import annotations

from typing import TypeVar

from sparkhvd.comm import objects, session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.features import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    start_timeline,
    stop_timeline,
)
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.comm.session import (
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    note_progress,
    rank,
    remove_process_set,
    shutdown,
    size,
    stall_report,
)

T = TypeVar("T")

Adasum = ReduceOp.ADASUM
Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather_object",
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "note_progress",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "stall_report",
    "start_timeline",
    "stop_timeline",
]


def broadcast_object(obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None) -> T:
    """Return the object of ``root_rank`` on every rank; the objects of the other ranks are ignored.

    Args:
        obj: any object that cloudpickle can pickle.
        root_rank: the rank whose object is sent.
        name: the operation's name, equal on all ranks.
        process_set: the ranks that take part, all by default.

    Raises:
        CollectiveError: on every rank, when the root's object cannot be pickled.
    """
    return objects.broadcast_object(
        session.current(), obj, root_rank, name=name or "broadcast_object", process_set=process_set
    )


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet | None = None) -> list[T]:
    """Return the objects of all ranks, in rank order, on every rank.

    Args:
        obj: any object that cloudpickle can pickle.
        name: the operation's name, equal on all ranks.
        process_set: the ranks that take part, all by default.

    Raises:
        CollectiveError: on every rank, when an object cannot be pickled.
    """
    return objects.allgather_object(session.current(), obj, name=name or "allgather_object", process_set=process_set)
