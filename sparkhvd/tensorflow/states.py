"""Broadcast and gather of variables and Python objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import tensorflow as tf

from sparkhvd.comm import objects, session
from sparkhvd.comm.collectives.buffers import Array
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.tensorflow.tensors import array_of, outside_graph, without_autograph

T = TypeVar("T")


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


def broadcast_object(obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None) -> T:
    """Return the object of ``root_rank`` on every rank; the objects of the other ranks are ignored.

    Args:
        obj: any object that cloudpickle can pickle.
        root_rank: the rank whose object is sent.
        name: the operation's name, equal on all ranks.
        process_set: the ranks that take part, all by default.
    """
    communicator = session.current()
    return objects.broadcast_object(
        communicator, obj, root_rank, name=name or "broadcast_object", process_set=process_set
    )


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet | None = None) -> list[T]:
    """Return the objects of all ranks, in rank order, on every rank.

    Args:
        obj: any object that cloudpickle can pickle.
        name: the operation's name, equal on all ranks.
        process_set: the ranks that take part, all by default.
    """
    return objects.allgather_object(session.current(), obj, name=name or "allgather_object", process_set=process_set)


def _native_variable(variable: Any) -> tf.Variable:
    """Return the TensorFlow variable inside a Keras variable."""
    return variable if isinstance(variable, tf.Variable) else variable.value
