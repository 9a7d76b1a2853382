"""Distributed TensorFlow: ``import sparkhvd.tensorflow as hvd``.

Names and meanings follow Horovod's, so that scripts written for it run after changing the import.
"""

from __future__ import annotations

from sparkhvd.comm.buffers import ReduceOp
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
    rank,
    remove_process_set,
    shutdown,
    size,
)
from sparkhvd.tensorflow.compression import Compression
from sparkhvd.tensorflow.gradients import DistributedGradientTape
from sparkhvd.tensorflow.movements import (
    allgather,
    alltoall,
    grouped_allgather,
    grouped_reducescatter,
    reducescatter,
)
from sparkhvd.tensorflow.operations import allreduce, barrier, broadcast, grouped_allreduce, join
from sparkhvd.tensorflow.states import allgather_object, broadcast_object, broadcast_variables
from sparkhvd.tensorflow.sync_batch_norm import SyncBatchNormalization

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

__all__ = [
    "Average",
    "Compression",
    "DistributedGradientTape",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size",
]
