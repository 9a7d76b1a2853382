"""Distributed Keras 3: ``import sparkhvd.keras as hvd``, on the TensorFlow or the PyTorch backend.

Names and meanings follow Horovod's. The collectives are those of the backend that Keras runs on
(``sparkhvd.tensorflow`` or ``sparkhvd.torch``) and resolve on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import keras

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
from sparkhvd.errors import ConfigError
from sparkhvd.keras import callbacks
from sparkhvd.keras.callbacks import broadcast_variables
from sparkhvd.keras.optimizer import DistributedOptimizer

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

_OF_BACKEND = (
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
)

__all__ = [
    "Average",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "broadcast_variables",
    "callbacks",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
]


def load_model(filepath: str, custom_objects: dict[str, Any] | None = None, compression: Any = None) -> Any:
    """A saved Keras model whose optimizer is distributed.

    Args:
        filepath: a ``.keras`` file.
        custom_objects: classes and functions by the names that the file knows them by.
        compression: see ``DistributedOptimizer``.
    """
    model = keras.saving.load_model(filepath, custom_objects=custom_objects)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


def __getattr__(name: str) -> Any:
    if name not in _OF_BACKEND:
        raise AttributeError(f"module 'sparkhvd.keras' has no attribute {name!r}")
    backend = keras.config.backend()
    if backend not in {"tensorflow", "torch"}:
        raise ConfigError(f"sparkhvd.keras has no collectives for the Keras backend {backend!r}.")
    if name == "SyncBatchNormalization" and backend != "tensorflow":
        raise ConfigError(f"SyncBatchNormalization needs Keras' TensorFlow backend, but Keras runs on {backend!r}.")
    return getattr(import_module(f"sparkhvd.{backend}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_OF_BACKEND])
