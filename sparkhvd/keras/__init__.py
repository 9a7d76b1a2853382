"""Distributed Keras 3: ``import sparkhvd.keras as hvd``, on the TensorFlow or the PyTorch backend.

Names and meanings follow Horovod's. The collectives are those of the backend that Keras runs on
(``sparkhvd.tensorflow`` or ``sparkhvd.torch``); they are imported on first use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from typing import Any

import keras

from sparkhvd.comm import interface
from sparkhvd.comm.interface import *  # noqa: F403  its __all__ lists the names
from sparkhvd.compat.horovod import missing
from sparkhvd.errors import ConfigError
from sparkhvd.keras import callbacks, elastic
from sparkhvd.keras.exchange import supported_backend
from sparkhvd.keras.legacy_files import restore_legacy_state
from sparkhvd.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from sparkhvd.keras.variables import broadcast_variables

logger = logging.getLogger(__name__)

_BACKEND_NAMES = (
    "Compression",
    "SyncBatchNormalization",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
)
# Collectives of one tensor, which Horovod scripts also call with numbers: hvd.allreduce(model.evaluate(...)).
_ACCEPTS_NUMBERS = frozenset({"allgather", "allreduce", "broadcast", "reducescatter"})

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
]
__all__ += interface.__all__


def load_model(
    filepath: str,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
    **options: Any,
) -> Any:
    """Load a saved Keras model, and distribute its optimizer.

    Args:
        filepath: a ``.keras`` file, or one of the older format ``.h5``.
        custom_optimizers: optimizer classes, which the file refers to by their names.
        custom_objects: classes and functions, by the names that the file uses.
        compression: see ``DistributedOptimizer``.
        options: other arguments of ``DistributedOptimizer``, which files do not contain. If the optimizer takes a step
            every k batches, ``backward_passes_per_step=k`` sums their gradients; otherwise they are averaged.

    Raises:
        ConfigError: an ``.h5`` file does not contain the optimizer's whole state.
    """
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | (custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        restore_legacy_state(model, filepath)
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)  # of a LossScaleOptimizer
        passes = optimizer.gradient_accumulation_steps
        if passes and "backward_passes_per_step" not in options:
            logger.warning(
                "The optimizer of %s takes a step every %d batches, with the mean of their gradients. If it was saved "
                "from a DistributedOptimizer that sums them, pass backward_passes_per_step=%d to load_model, too.",
                filepath,
                passes,
                passes,
            )
        DistributedOptimizer(optimizer, compression=compression, **options)
    return model


def __getattr__(name: str) -> Any:
    if name not in _BACKEND_NAMES:
        raise AttributeError(missing("sparkhvd.keras", name, [*__all__, *_BACKEND_NAMES]))
    backend = supported_backend()
    if name == "SyncBatchNormalization" and backend != "tensorflow":
        raise ConfigError(
            f"SyncBatchNormalization needs Keras' TensorFlow backend, but Keras runs on {backend!r}. Set "
            "KERAS_BACKEND=tensorflow before keras is imported, or use keras.layers.BatchNormalization, with which "
            "every rank normalizes over its own rows."
        )
    function = getattr(import_module(f"sparkhvd.{backend}"), name)
    return _accepting_numbers(function) if backend == "torch" and name in _ACCEPTS_NUMBERS else function


def _accepting_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a PyTorch collective accept numbers, lists and arrays, as the TensorFlow collectives do."""

    @wraps(function)
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return function(keras.ops.convert_to_tensor(tensor), *args, **kwargs)

    return call


def __dir__() -> list[str]:
    return sorted([*globals(), *_BACKEND_NAMES])
