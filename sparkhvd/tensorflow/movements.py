"""Collectives on TensorFlow tensors after which ranks hold different rows: allgather, reducescatter, alltoall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import Array, ReduceOp
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError
from sparkhvd.tensorflow.compression import Compression, Compressor
from sparkhvd.tensorflow.operations import grouped_allreduce
from sparkhvd.tensorflow.tensors import array_of, as_written, graph_name, outside_graph


@as_written
def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet | None = None) -> tf.Tensor:
    """Join the tensors of all ranks along the first dimension, in rank order.

    The gradient is this rank's part of the mean of the ranks' gradients.

    Args:
        tensor: the same dtype and shape on all ranks but for the first dimension.
        name: what the ranks know the operation by; made by counting (in a graph, from the tensor's name) when None.
        process_set: the ranks that take part, all by default.
    """
    return grouped_allgather([tensor], name, process_set)[0]


@as_written
def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet | None = None
) -> list[tf.Tensor]:
    """Join each of several tensors with those of the other ranks, in one go; see ``allgather``."""
    if not tensors:
        return []
    values = [tf.convert_to_tensor(tensor) for tensor in tensors]
    named = graph_name("allgather", name, values[0])

    def run(*eager: tf.Tensor) -> Sequence[Any]:
        communicator = session.current()
        arrays = [array_of(value, "The tensor to gather") for value in eager]
        handle = communicator.grouped_allgather_async(arrays, name=named, process_set=process_set)
        rows = np.array([[len(array) if array.ndim else 0 for array in arrays]])
        return [*handle.wait(), communicator.allgather(rows, name=named and f"{named}.rows", process_set=process_set)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*given: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        like = [(value.dtype, _with_any_rows(value)) for value in given]
        *joined, rows = outside_graph(run, given, [*like, (tf.int64, tf.TensorShape([None, len(given)]))])

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            means = grouped_allreduce(upstream, name=named and f"{named}.gradient", process_set=process_set)
            me = session.current().channel(process_set).engine.rank
            starts = tf.reduce_sum(rows[:me], axis=0)
            return [mean[starts[i] : starts[i] + rows[me, i]] for i, mean in enumerate(means)]

        return joined, gradient

    return list(differentiable(*values))


@as_written
def reducescatter(  # noqa: PLR0917  the order of the arguments is Horovod's
    tensor: Any,
    compression: Compressor = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Combine the tensors of all ranks element by element, and leave each rank with its part of the rows.

    The first dimension is divided as evenly as possible; the first ranks have one row more. The gradient of a mean is
    the ranks' gradients joined, that of a sum the number of ranks times as large.

    Args:
        tensor: the same shape and dtype on all ranks, of at least one dimension.
        compression: what the tensor travels as.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        name: what the ranks know the operation by; made by counting (in a graph, from the tensor's name) when None.
        process_set: the ranks that take part, all by default.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the result; equal on all ranks.
    """
    return grouped_reducescatter(
        [tensor], compression, op, name, process_set, prescale_factor=prescale_factor, postscale_factor=postscale_factor
    )[0]


@as_written
def grouped_reducescatter(  # noqa: PLR0917  the order of the arguments is Horovod's
    tensors: Sequence[Any],
    compression: Compressor = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Do what ``reducescatter`` does with each of several tensors, in one go."""
    if not tensors:
        return []
    packed, contexts = zip(*(compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors), strict=True)
    named = graph_name("reducescatter", name, packed[0])

    def run(*eager: tf.Tensor) -> Sequence[Array]:
        arrays = [array_of(value, "The tensor to reduce") for value in eager]
        options: Any = {"prescale": prescale_factor, "postscale": postscale_factor}
        return session.current().grouped_reducescatter(arrays, op, name=named, process_set=process_set, **options)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*given: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if op not in {ReduceOp.AVERAGE, ReduceOp.SUM}:
                raise ConfigError(f"A reducescatter with op={op} has no gradient; use Average or Sum.")
            ranks = session.current().channel(process_set).size if op is ReduceOp.SUM else 1
            scale = ranks * prescale_factor * postscale_factor
            scaled = [each * tf.cast(scale, each.dtype) for each in upstream]
            return grouped_allgather(scaled, named and f"{named}.gradient", process_set)

        return outside_graph(run, given, [(value.dtype, _with_any_rows(value)) for value in given]), gradient

    results = differentiable(*packed)
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


@as_written
def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet | None = None
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Send a part of the tensor to every rank, and join what came from each, in rank order.

    With ``splits`` the result is a pair: what came, and a tensor of how many rows came from each rank. The gradient is
    every rank's gradient of what it got from here.

    Args:
        tensor: rows for all ranks, in rank order; the same dtype and shape on all ranks but for the first dimension.
        splits: how many rows go to each rank, a list or a tensor of integers; equal numbers when None.
        name: what the ranks know the operation by; made by counting (in a graph, from the tensor's name) when None.
        process_set: the ranks that take part, all by default.
    """
    tensor = tf.convert_to_tensor(tensor)
    named = graph_name("alltoall", name, tensor)
    given = [] if splits is None else [tf.cast(tf.convert_to_tensor(splits), tf.int64)]

    def run(value: tf.Tensor, *rows: tf.Tensor) -> Sequence[Any]:
        content, received = session.current().alltoall(
            array_of(value, "The tensor to send"),
            rows[0].numpy().tolist() if rows else None,
            name=named,
            process_set=process_set,
        )
        return [content, np.array(received, np.int64)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(value: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Any]:
        like = [(value.dtype, _with_any_rows(value)), (tf.int64, tf.TensorShape([None]))]
        content, received = outside_graph(run, [value, *given], like)

        def gradient(upstream: tf.Tensor, _of_rows: Any) -> tf.Tensor:
            return alltoall(upstream, received, named and f"{named}.gradient", process_set)[0]

        return (content, received), gradient

    content, received = differentiable(tensor)
    return content if splits is None else (content, received)


def _with_any_rows(tensor: tf.Tensor) -> tf.TensorShape:
    return tf.TensorShape([None, *tensor.shape[1:]]) if tensor.shape.rank else tensor.shape
