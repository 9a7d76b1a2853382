"""Distributed Keras 3: ``import sparkhvd.keras as hvd``, on the TensorFlow or the PyTorch backend.

Names and meanings follow Horovod's. The collectives are those of the backend that Keras runs on
(``sparkhvd.tensorflow`` or ``sparkhvd.torch``) and resolve on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from typing import Any

import keras

from sparkhvd.comm import interface
from sparkhvd.comm.interface import *  # noqa: F403  it says itself what it gives
from sparkhvd.compat.horovod import missing
from sparkhvd.errors import ConfigError
from sparkhvd.keras import callbacks
from sparkhvd.keras.callbacks import broadcast_variables
from sparkhvd.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer

_OF_BACKEND = (
    "Compression",
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
# Those of one tensor, which Horovod's scripts call with numbers: hvd.allreduce(model.evaluate(...)).
_OF_VALUES = frozenset({"allgather", "allreduce", "broadcast", "reducescatter"})

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "broadcast_variables",
    "callbacks",
    "load_model",
]
__all__ += interface.__all__


def load_model(
    filepath: str,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
) -> Any:
    """A saved Keras model whose optimizer is distributed.

    Args:
        filepath: a ``.keras`` file.
        custom_optimizers: classes of optimizers, known by their names.
        custom_objects: classes and functions by the names that the file knows them by.
        compression: see ``DistributedOptimizer``.
    """
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | (custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


def __getattr__(name: str) -> Any:
    if name not in _OF_BACKEND:
        raise AttributeError(missing("sparkhvd.keras", name, [*__all__, *_OF_BACKEND]))
    backend = keras.config.backend()
    if backend not in {"tensorflow", "torch"}:
        raise ConfigError(f"sparkhvd.keras has no collectives for the Keras backend {backend!r}.")
    if name == "SyncBatchNormalization" and backend != "tensorflow":
        raise ConfigError(f"SyncBatchNormalization needs Keras' TensorFlow backend, but Keras runs on {backend!r}.")
    function = getattr(import_module(f"sparkhvd.{backend}"), name)
    return _of_values(function) if backend == "torch" and name in _OF_VALUES else function


def _of_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a collective of PyTorch's take numbers, lists and arrays, as TensorFlow's do."""

    @wraps(function)
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return function(keras.ops.convert_to_tensor(tensor), *args, **kwargs)

    return call


def __dir__() -> list[str]:
    return sorted([*globals(), *_OF_BACKEND])
