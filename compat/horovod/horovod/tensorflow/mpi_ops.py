"""The collectives on TensorFlow's tensors, and the functions of every framework."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import wraps
from typing import Any

import tensorflow as tf

import sparkhvd.tensorflow as _hvd
from horovod._signatures import with_parameters, with_scope
from horovod.common import interface
from horovod.common.basics import HorovodBasics
from horovod.common.interface import *  # noqa: F403  its __all__ lists the names
from horovod.common.util import get_average_backwards_compatibility_fun
from horovod.common.util import num_rank_is_power_2 as check_num_rank_power_of_2
from sparkhvd.errors import HorovodInternalError
from sparkhvd.tensorflow import barrier

__all__ = [
    "HorovodInternalError",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "check_num_rank_power_of_2",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += interface.__all__
__all__.remove("allgather_object")  # those of horovod.tensorflow.functions take a session
__all__.remove("broadcast_object")

_basics = HorovodBasics(__file__)

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(interface)

_REDUCTION_PARAMETERS = "average device_dense device_sparse compression op prescale_factor postscale_factor"
_SCALE_PARAMETERS = "prescale_factor postscale_factor"


@wraps(_hvd.allreduce)
def _allreduce(tensor: Any, **options: Any) -> Any:
    _reject_scaled_slices([tensor], **options)
    return _hvd.allreduce(tensor, **options)


@wraps(_hvd.grouped_allreduce)
def _grouped_allreduce(tensors: Sequence[Any], **options: Any) -> Any:
    _reject_scaled_slices(tensors, **options)
    return _hvd.grouped_allreduce(tensors, **options)


def _reject_scaled_slices(
    tensors: Sequence[Any], *, prescale_factor: float = 1.0, postscale_factor: float = 1.0, **_: Any
) -> None:
    if prescale_factor == postscale_factor == 1 or not any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        return
    raise NotImplementedError(
        f"tf.IndexedSlices cannot have prescale_factor={prescale_factor} and postscale_factor={postscale_factor} in "
        "horovod.tensorflow. Call sparkhvd.tensorflow.allreduce, or scale the values yourself."
    )


@wraps(_hvd.alltoall)
def _alltoall(tensor: Any, **options: Any) -> Any:
    result = _hvd.alltoall(tensor, **options)
    if not isinstance(result, tuple):
        return result
    content, received = result
    return content, tf.cast(received, tf.int32)


def join() -> tf.Tensor:
    """See ``sparkhvd.tensorflow.join``; the rank that joined last is an ``int32``."""
    return tf.cast(_hvd.join(), tf.int32)


allreduce = with_parameters(
    f"tensor {_REDUCTION_PARAMETERS} name process_set ignore_name_scope", with_scope("allreduce", _allreduce)
)
grouped_allreduce = with_parameters(
    f"tensors {_REDUCTION_PARAMETERS} process_set ignore_name_scope name",
    with_scope("grouped_allreduce", _grouped_allreduce),
)
reducescatter = with_parameters(
    f"tensor device_dense compression op name process_set ignore_name_scope {_SCALE_PARAMETERS}",
    with_scope("reducescatter", _hvd.reducescatter),
)
grouped_reducescatter = with_parameters(
    f"tensors device_dense compression op process_set {_SCALE_PARAMETERS}", _hvd.grouped_reducescatter
)
allgather = with_parameters("tensor name ignore_name_scope process_set", with_scope("allgather", _hvd.allgather))
grouped_allgather = with_parameters(
    "tensors name ignore_name_scope process_set", with_scope("grouped_allgather", _hvd.grouped_allgather)
)
broadcast = with_parameters(
    "tensor root_rank name ignore_name_scope process_set", with_scope("broadcast", _hvd.broadcast)
)
alltoall = with_parameters("tensor splits name ignore_name_scope process_set", with_scope("alltoall", _alltoall))


def broadcast_(
    variables: Iterable[tf.Variable],
    root_rank: int,
    name: str | None = None,  # noqa: ARG001  the variables have names
    process_set: interface.ProcessSet = interface.global_process_set,
) -> list[tf.Variable]:
    """Overwrite the variables with the values of ``root_rank``, and return the variables."""
    changed = list(variables)
    _hvd.broadcast_variables(changed, root_rank, process_set)
    return changed


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return the rank as a tensor."""
    return tf.constant(interface.rank(), tf.int32, name=name or "rank")


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return the number of the rank on its host as a tensor."""
    return tf.constant(interface.local_rank(), tf.int32, name=name or "local_rank")


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks, of the job or of a process set, as a tensor."""
    return tf.constant(len(_ranks_of(process_set_id)), tf.int32, name=name or "size")


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this host as a tensor."""
    return tf.constant(interface.local_size(), tf.int32, name=name or "local_size")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 on the ranks of a process set and 0 on others, as a tensor."""
    included = interface.rank() in _ranks_of(process_set_id)
    return tf.constant(int(included), tf.int32, name=name or "included")


def _ranks_of(process_set_id: int) -> list[int]:
    from sparkhvd.comm import session  # noqa: PLC0415

    return list(session.current().process_sets()[process_set_id]) if process_set_id else [*range(interface.size())]
