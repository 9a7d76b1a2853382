"""Broadcast of variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import Array
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
        handles = [
            communicator.broadcast_async(
                array_of(value, f"Variable {index}"),
                root_rank,
                name=f"broadcast_variables.{index}",
                process_set=process_set,
            )
            for index, value in enumerate(values)
        ]
        return [handle.wait() for handle in handles]

    values = [tf.convert_to_tensor(target) for target in targets]
    received = outside_graph(run, values, [(value.dtype, value.shape) for value in values])
    for target, value in zip(targets, received, strict=True):
        target.assign(value)


def _native_variable(variable: Any) -> tf.Variable:
    """Return the TensorFlow variable inside a Keras variable."""
    return variable if isinstance(variable, tf.Variable) else variable.value
