"""TensorFlow tensors as the memory that the core reads and writes, in eager mode and inside ``tf.function``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from sparkhvd.comm.collectives.buffers import DTYPES, Array
from sparkhvd.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])
EagerFunction = Callable[..., Sequence[Any]]  # eager tensors in, arrays or tensors out


def as_written(function: Function) -> Function:
    """Keep AutoGraph, which rewrites what a ``tf.function`` calls, from a function that has nothing to rewrite."""
    kept: Function = tf.autograph.experimental.do_not_convert(function)
    return kept


def array_of(tensor: tf.Tensor, what: str) -> Array:
    """The values of an eager tensor; shares the memory of one on the CPU, so that it must not be written to.

    Raises:
        ConfigError: collectives have no such element type; ``what`` says which tensor has it.
    """
    if tensor.dtype.name not in DTYPES:
        raise ConfigError(f"{what} has dtype {tensor.dtype.name}; collectives take {', '.join(sorted(DTYPES))}.")
    # TensorFlow refuses to show a scalar as an array without a copy.
    values = np.asarray(tensor if tensor.shape.rank else tensor.numpy())
    return np.require(values, requirements="C")


def outside_graph(
    function: EagerFunction, tensors: Sequence[tf.Tensor], like: Sequence[tuple[tf.DType, tf.TensorShape]]
) -> list[tf.Tensor]:
    """Call ``function`` with eager tensors: at once in eager mode, at every run of the graph inside ``tf.function``.

    The functions of one graph run one after the other in program order, so all ranks meet in the same order.

    Args:
        function: takes the tensors, returns one array or tensor per entry of ``like``.
        tensors: the arguments.
        like: dtype and static shape of every result.

    Raises:
        ConfigError: the graph is one of TensorFlow 1, whose sessions run operations in no order that ranks share.
    """
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(result) for result in function(*tensors)]
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise ConfigError(
            "Collectives work in eager mode and inside tf.function, not in the graphs and sessions of TensorFlow 1 "
            "(tf.compat.v1): move the training step into a tf.function."
        )
    results = tf.py_function(
        lambda *eager: [tf.convert_to_tensor(result) for result in function(*eager)],
        list(tensors),
        [dtype for dtype, _ in like],
    )
    for result, (_, shape) in zip(results, like, strict=True):
        result.set_shape(shape)
    return list(results)


def graph_name(kind: str, name: str | None, tensor: tf.Tensor) -> str | None:
    """What the ranks know an operation by: the given name, or inside a graph the tensor's, which ranks have in common.

    None in eager mode, where operations are counted. A name that comes back every step is negotiated only once.
    """
    if name is not None or tf.executing_eagerly():
        return name
    return f"{kind}.{tensor.name}"
