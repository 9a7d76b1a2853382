"""Broadcast of variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import DTYPES, Array, as_bytes, from_bytes
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.tensorflow.tensors import array_of, outside_graph, without_autograph


@without_autograph
def broadcast_variables(variables: Iterable[Any], root_rank: int = 0, process_set: ProcessSet | None = None) -> None:
    """Overwrite variables with those of ``root_rank``; inside a graph, at every run.

    Args:
        variables: TensorFlow or Keras variables, the same on all ranks in the same order.
        root_rank: the rank whose values are sent.
        process_set: the ranks that take part, all by default.
    """
    targets = [_native_variable(variable) for variable in variables]

    def run(*values: tf.Tensor) -> list[Array]:
        communicator = session.current()
        arrays = [_array_of(value, f"Variable {index}") for index, value in enumerate(values)]
        handles = [
            communicator.broadcast_async(
                as_bytes(array), root_rank, name=f"broadcast_variables.{index}", process_set=process_set
            )
            for index, array in enumerate(arrays)
        ]
        return [from_bytes(handle.wait(), array) for handle, array in zip(handles, arrays, strict=True)]

    values = [tf.convert_to_tensor(target) for target in targets]
    received = outside_graph(run, values, [(value.dtype, value.shape) for value in values])
    for target, value in zip(targets, received, strict=True):
        target.assign(value)


def _array_of(value: tf.Tensor, what: str) -> Array:
    """Return the values of an eager tensor of any dtype with bytes."""
    if value.dtype.name in DTYPES or value.dtype == tf.string:
        return array_of(value, what)
    return np.require(value.numpy(), requirements="C")


def _native_variable(variable: Any) -> tf.Variable:
    """Return the TensorFlow variable inside a Keras variable."""
    return variable if isinstance(variable, tf.Variable) else variable.value
