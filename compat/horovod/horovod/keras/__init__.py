"""``import horovod.keras as hvd`` on top of ``sparkhvd.keras``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

import sparkhvd.keras as _hvd
from horovod._signatures import with_parameters, with_scope
from horovod.common import interface
from horovod.common.interface import *  # noqa: F403  its __all__ lists the names
from horovod.keras import callbacks, elastic
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.compat.horovod import missing

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += interface.__all__

Compression: Any = _hvd.Compression

_OPTIMIZER_PARAMETERS = (
    "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op"
)


DistributedOptimizer = with_parameters(f"{_OPTIMIZER_PARAMETERS} num_groups groups", _hvd.DistributedOptimizer)
PartialDistributedOptimizer = with_parameters(
    f"{_OPTIMIZER_PARAMETERS} groups process_set local_layers scale_local_gradients", _hvd.PartialDistributedOptimizer
)
load_model = with_parameters("filepath custom_optimizers custom_objects compression legacy_opts", _hvd.load_model)


_allgather = with_scope("allgather", _hvd.allgather)
_allreduce_tensor = with_scope("allreduce", _hvd.allreduce)
_broadcast = with_scope("broadcast", _hvd.broadcast)
_reducescatter = with_scope("reducescatter", _hvd.reducescatter)


def _allreduce(value: Any, **options: Any) -> Any:
    return _allreduce_tensor(value, **options)


allreduce = with_parameters("value name average prescale_factor postscale_factor op compression", _allreduce)


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate the values of all ranks along the first dimension."""
    return _allgather(value, name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of ``root_rank``."""
    return _broadcast(value, root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = interface.Average) -> Any:
    """Combine the values of all ranks, and return this rank's part of the rows."""
    return _reducescatter(value, name=name, op=op)


def broadcast_global_variables(root_rank: int) -> Never:  # noqa: ARG001
    """Raise ``RuntimeError``, as Horovod does outside the graphs of TensorFlow 1."""
    raise RuntimeError(
        "sparkhvd has no graph sessions of TensorFlow 1. Use callbacks.BroadcastGlobalVariablesCallback(0) with "
        "model.fit, or hvd.broadcast_variables(model.variables, root_rank=0) of horovod.tensorflow."
    )


if not TYPE_CHECKING:  # with it, every name would exist for a type checker

    def __getattr__(name: str) -> object:
        raise AttributeError(missing("horovod.keras", name, __all__))
