"""Access to the memory of TensorFlow tensors for the core, in eager mode and inside ``tf.function``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import DTYPES, Array
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError, MismatchError, SparkHvdError, UnsupportedError

Function = TypeVar("Function", bound=Callable[..., Any])
EagerFunction = Callable[..., Sequence[Any]]  # eager tensors in, arrays or tensors out

_OPERATIONS = "sparkhvd_operations"  # the collection of a graph with the kinds of its unnamed operations

# The latest errors of functions inside graphs. TensorFlow reports them as errors of its own, with their text.
_failures: deque[SparkHvdError] = deque(maxlen=8)


class TensorMismatchError(MismatchError, tf.errors.FailedPreconditionError):  # type: ignore[misc]  # tf has no types
    """A ``MismatchError`` in eager mode, for programs that catch TensorFlow's errors."""

    def __init__(self, message: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


class TensorConfigError(ConfigError, tf.errors.InvalidArgumentError):  # type: ignore[misc]  # tf has no types
    """A ``ConfigError`` in eager mode, for programs that catch TensorFlow's errors."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


def without_autograph(function: Function) -> Function:
    """Exempt a function from AutoGraph, which would otherwise rewrite it when a ``tf.function`` calls it."""
    exempt: Function = tf.autograph.experimental.do_not_convert(function)
    return exempt


def dense_tensor(value: Any) -> tf.Tensor:
    """Convert a value to the dense tensor that a collective takes.

    Raises:
        ConfigError: the value is a ragged or sparse tensor.
    """
    if isinstance(value, tf.RaggedTensor):
        raise ConfigError("Collectives take no tf.RaggedTensor; pass its flat_values and its row_lengths().")
    if isinstance(value, tf.SparseTensor):
        raise ConfigError("Collectives take no tf.SparseTensor; convert it with tf.sparse.to_dense().")
    return tf.convert_to_tensor(value)


def array_of(tensor: tf.Tensor, what: str) -> Array:
    """Return the values of an eager tensor. The array shares the memory of a CPU tensor, so it must not be written to.

    Raises:
        ConfigError: collectives do not support the dtype; ``what`` names the tensor in the message.
    """
    if tensor.dtype.name not in DTYPES:
        raise ConfigError(f"{what} has dtype {tensor.dtype.name}; collectives take {', '.join(sorted(DTYPES))}.")
    # TensorFlow cannot expose a scalar as an array without a copy.
    values = np.asarray(tensor if tensor.shape.rank else tensor.numpy())
    return np.require(values, requirements="C")


def outside_graph(
    function: EagerFunction, tensors: Sequence[tf.Tensor], like: Sequence[tuple[tf.DType, tf.TensorShape]]
) -> list[tf.Tensor]:
    """Call ``function`` with eager tensors: at once in eager mode, at every run of the graph inside ``tf.function``.

    The functions of one graph run one after another in program order, so all ranks call collectives in the same order.

    Args:
        function: takes the tensors, returns one array or tensor per entry of ``like``.
        tensors: the arguments.
        like: dtype and static shape of every result.

    Raises:
        ConfigError: XLA compiles the graph; or it is a TensorFlow 1 graph, whose sessions run operations in an order
            that differs between ranks.
    """
    if tf.executing_eagerly():
        try:
            return [tf.convert_to_tensor(result) for result in function(*tensors)]
        except MismatchError as error:
            raise TensorMismatchError(str(error)) from error.__cause__
        except ConfigError as error:
            if isinstance(error, UnsupportedError):
                raise
            raise TensorConfigError(str(error)) from error.__cause__
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise ConfigError(
            "Collectives work in eager mode and inside tf.function, not in the graphs and sessions of TensorFlow 1 "
            "(tf.compat.v1): move the training step into a tf.function."
        )
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ConfigError(
            "XLA cannot compile collectives. Pass jit_compile=False to tf.function, or to the compile() of a Keras "
            "model: with a GPU, Keras uses XLA by default."
        )

    def call(*eager: tf.Tensor) -> list[tf.Tensor]:
        try:
            return [tf.convert_to_tensor(result) for result in function(*eager)]
        except SparkHvdError as error:
            _failures.append(error)
            raise

    returned = tf.py_function(call, list(tensors), [dtype for dtype, _ in like])
    results = returned if like else []  # without results, TensorFlow returns the operation
    for result, (_, shape) in zip(results, like, strict=True):
        result.set_shape(shape)
    return list(results)


def failure_behind(error: tf.errors.OpError) -> SparkHvdError | None:
    """Return the error of sparkhvd that TensorFlow reports as ``error``, after a function failed inside a graph."""
    for failure in reversed(_failures):
        if str(failure).strip() in error.message:
            return failure
    return None


@contextmanager
def own_failures() -> Iterator[None]:
    """Raise the error of sparkhvd itself if TensorFlow reports it as an error of its own, from inside a graph."""
    try:
        yield
    except tf.errors.OpError as error:
        cause = failure_behind(error)
        if cause is None:
            raise
        raise cause from error
    finally:
        _failures.clear()  # their tracebacks refer to the model


def as_dtype(number: Any, dtype: tf.DType) -> tf.Tensor:
    """Return a number or a scalar tensor in a dtype; ``tf.cast`` alone would round a number to single precision."""
    return tf.cast(number if tf.is_tensor(number) else tf.constant(number, tf.float64), dtype)


def rank_in(process_set: ProcessSet | None) -> Any:
    """Return this process's rank in the process set: a number, or a tensor as ``_current`` explains."""
    return _current(lambda: session.current().channel(process_set).engine.rank, tf.int64)


def size_of(process_set: ProcessSet | None) -> Any:
    """Return the number of ranks in the process set: a number, or a float64 tensor as ``_current`` explains."""
    return _current(lambda: session.current().channel(process_set).size, tf.float64)


def _current(number: Callable[[], int], dtype: tf.DType) -> Any:
    """Return a number, inside a graph of an elastic job as a tensor: the ranks change while the graph stays."""
    if tf.executing_eagerly() or session.membership() is None:
        return number()
    return outside_graph(lambda: [tf.constant(number(), dtype)], [], [(dtype, tf.TensorShape([]))])[0]


def graph_name(kind: str, name: str | None) -> str | None:
    """Return an operation's name: ``name`` if set; inside a graph, one that numbers the graph's operations of a kind.

    Return None in eager mode, where operations are numbered. A name that is used in every step is negotiated only once.
    The names of tensors are unsuitable, because Keras numbers layers in the order in which a process creates them.
    """
    if name is not None or tf.executing_eagerly():
        return name
    operations: list[str] = tf.compat.v1.get_default_graph().get_collection_ref(_OPERATIONS)
    operations.append(kind)
    return f"{kind}.graph.{operations.count(kind) - 1}"
