"""The interface that all frameworks share: the job and its ranks, process sets, reductions, the timeline.

``sparkhvd.torch``, ``sparkhvd.tensorflow`` and ``sparkhvd.keras`` re-export all of it and add their own.
"""

from __future__ import annotations

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

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

__all__ = [
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
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
