"""Distributed TensorFlow: ``import sparkhvd.tensorflow as hvd``.

Names and meanings follow Horovod's, so that scripts written for it run after changing the import.
"""

from __future__ import annotations

from sparkhvd.comm.buffers import ReduceOp
from sparkhvd.comm.session import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from sparkhvd.tensorflow.compression import Compression
from sparkhvd.tensorflow.gradients import DistributedGradientTape
from sparkhvd.tensorflow.operations import allgather, allreduce, barrier, broadcast, grouped_allreduce
from sparkhvd.tensorflow.states import allgather_object, broadcast_object, broadcast_variables

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
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "cross_rank",
    "cross_size",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
