"""Collectives on TensorFlow tensors, in eager mode and inside ``tf.function``, with gradients.

Every function submits all its operations before it waits for the first one, so that the core can fuse them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sparkhvd.comm import session
from sparkhvd.comm.collectives.arrays import array_from
from sparkhvd.comm.collectives.buffers import Array, ReduceOp, buffer_of
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions, require_compressor
from sparkhvd.comm.collectives.raw import MISSING_GRADIENTS, invalid_splits
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError, UnsupportedError
from sparkhvd.tensorflow import gpu
from sparkhvd.tensorflow.compression import Compression, Compressor
from sparkhvd.tensorflow.tensors import (
    array_of,
    as_dtype,
    dense_tensor,
    graph_name,
    outside_graph,
    rank_in,
    size_of,
    without_autograph,
)


def reduction(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """Return the reduction that the arguments select, ``Average`` by default.

    Raises:
        ConfigError: both arguments are set.
    """
    if average is None:
        return ReduceOp.AVERAGE if op is None else ReduceOp(op)
    if op is not None:
        raise ConfigError(f"average={average} and op={op} are both set. Pass op only; average is deprecated.")
    warnings.warn("average= is deprecated; pass op=hvd.Average or op=hvd.Sum.", DeprecationWarning, stacklevel=3)
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


@without_autograph
def allreduce(  # noqa: PLR0917  the order of the arguments is Horovod's
    tensor: Any,
    average: bool | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Combine the tensors of all ranks into a new tensor.

    The gradient of a sum or mean is the sum or mean of the ranks' gradients; the other reductions have none.

    Args:
        tensor: a dense tensor with the same shape and dtype on all ranks; or ``tf.IndexedSlices``, which are gathered
            (for ``Average`` and ``Sum``), because their rows differ between ranks. Rows with the same index are added
            up. The average of integer slices has the dtype of TensorFlow's division: ``float32`` for up to 16 bits,
            else ``float64``.
        average: deprecated, use ``op``.
        compression: compresses the tensor for transfer.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the result; equal on all ranks.
        name: the operation's name, equal on all ranks; None numbers it (in a graph, by kind and order).
        process_set: the ranks that take part, all by default.

    Raises:
        ConfigError: slices with a reduction other than a sum or mean, or a dtype that collectives do not support.
        MismatchError: the ranks disagree on shape, dtype or reduction.
    """
    op = reduction(average, op)
    if isinstance(tensor, tf.IndexedSlices):
        return reduce_slices([tensor], Reduction(op, prescale_factor, postscale_factor), name, process_set)[0]
    return grouped_allreduce(
        [tensor],
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
    )[0]


@without_autograph
def grouped_allreduce(  # noqa: PLR0917  the order of the arguments is Horovod's
    tensors: Sequence[Any],
    average: bool | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> list[Any]:
    """Combine several dense tensors in one operation; see ``allreduce`` for the arguments.

    ``tf.IndexedSlices`` among them are gathered in a second operation.
    """
    if not tensors:
        return []
    scaled = Reduction(reduction(average, op), prescale_factor, postscale_factor)
    slices = [tensor for tensor in tensors if isinstance(tensor, tf.IndexedSlices)]
    gathered = iter(reduce_slices(slices, scaled, name and f"{name}.sparse", process_set) if slices else ())
    values = [dense_tensor(tensor) for tensor in tensors if not isinstance(tensor, tf.IndexedSlices)]
    full_name = graph_name("allreduce", name) if values else None
    # A tensor may be in the group twice, so its own name does not identify its position.
    names = [f"{full_name}.{i}" if full_name and len(values) > 1 else full_name for i in range(len(values))]
    dense = iter(reduce_dense(values, scaled, names, compression, process_set))
    return [next(gathered) if isinstance(tensor, tf.IndexedSlices) else next(dense) for tensor in tensors]


def reduce_dense(
    tensors: Sequence[tf.Tensor],
    reduction: Reduction,
    names: Sequence[str | None],
    compression: Compressor = Compression.none,
    process_set: ProcessSet | None = None,
) -> list[tf.Tensor]:
    """Combine dense tensors under names of their own; None numbers a tensor."""
    if not tensors:
        return []
    op, prescale, postscale = reduction
    require_compressor(compression)
    packed, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)

    def run(*eager: tf.Tensor) -> Sequence[Array | tf.Tensor]:
        if gpu.uses_nccl(eager, op, process_set):
            return gpu.allreduce(eager, op, prescale, postscale, names, process_set)
        communicator = session.current()
        handles = [
            communicator.allreduce_async(
                array_of(value, f"Tensor {name or ''}".rstrip()),
                op,
                name=name,
                prescale=prescale,
                postscale=postscale,
                process_set=process_set,
            )
            for value, name in zip(eager, names, strict=True)
        ]
        return [handle.wait() for handle in handles]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*values: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if op not in {ReduceOp.AVERAGE, ReduceOp.SUM}:
                raise ConfigError(f"An allreduce with op={op} has no gradient; use Average or Sum.")
            gradient_names = [name and f"{name}.gradient" for name in names]
            combined = reduce_dense(upstream, Reduction(op), gradient_names, process_set=process_set)
            return _with_own_scales(combined, prescale * postscale)

        return outside_graph(run, values, [(value.dtype, value.shape) for value in values]), gradient

    results = differentiable(*packed)
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


@without_autograph
def broadcast(tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None) -> tf.Tensor:
    """Return the tensor of ``root_rank``, as a new tensor on every rank.

    The gradient is the mean of the ranks' gradients on the root, and zero elsewhere.

    Args:
        tensor: the same shape and dtype on all ranks.
        root_rank: the rank whose tensor is sent, numbered in the whole job.
        name: the operation's name, equal on all ranks; None numbers it (in a graph, by kind and order).
        process_set: the ranks that take part, all by default.
    """
    tensor = dense_tensor(tensor)
    name = graph_name("broadcast", name)

    def run(value: tf.Tensor) -> Sequence[Array]:
        array = array_of(value, "The tensor to send")
        return [session.current().broadcast(array, root_rank, name=name, process_set=process_set)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(value: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            mean = allreduce(upstream, name=name and f"{name}.gradient", process_set=process_set)
            return tf.where(rank_in(None) == root_rank, mean, tf.zeros_like(mean))

        return outside_graph(run, [value], [(value.dtype, value.shape)])[0], gradient

    return differentiable(tensor)


@without_autograph
def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet | None = None) -> tf.Tensor:
    """Concatenate the tensors of all ranks along the first dimension, in rank order.

    The gradient is this rank's part of the mean of the ranks' gradients.

    Args:
        tensor: the same dtype and shape on all ranks, except for the first dimension.
        name: the operation's name, equal on all ranks; None numbers it (in a graph, by kind and order).
        process_set: the ranks that take part, all by default.
    """
    return grouped_allgather([tensor], name, process_set)[0]


@without_autograph
def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet | None = None
) -> list[tf.Tensor]:
    """Gather several tensors in one operation; see ``allgather``."""
    if not tensors:
        return []
    values = [dense_tensor(tensor) for tensor in tensors]
    full_name = graph_name("allgather", name)

    def run(*eager: tf.Tensor) -> Sequence[Any]:
        arrays = [array_of(value, "The tensor to gather") for value in eager]
        sources = [buffer_of(array, "The tensor to gather") for array in arrays]
        gathered = session.current().gather_buffers(sources, SubmitOptions(full_name, process_set)).wait()
        joined = [array_from(*pair) for pair in zip(gathered, arrays, strict=True)]
        # The number of rows of every tensor on every rank; 0 for a rank that has joined.
        return [*joined, np.array([part.first_dims for part in gathered], np.int64).T]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*own: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        like = [(value.dtype, _shape_with_any_rows(value)) for value in own]
        *joined, rows = outside_graph(run, own, [*like, (tf.int64, tf.TensorShape([None, len(own)]))])

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            means = grouped_allreduce(upstream, name=full_name and f"{full_name}.gradient", process_set=process_set)
            rank = rank_in(process_set)
            starts = tf.reduce_sum(rows[:rank], axis=0)
            return [mean[starts[i] : starts[i] + rows[rank, i]] for i, mean in enumerate(means)]

        return joined, gradient

    return list(differentiable(*values))


@without_autograph
def reducescatter(  # noqa: PLR0917  the order of the arguments is Horovod's
    tensor: Any,
    compression: Compressor = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Combine the tensors of all ranks element by element, and return this rank's part of the rows.

    The first dimension is split as evenly as possible; the first ranks get one more row. The gradient of a mean is
    the concatenation of the ranks' gradients; that of a sum is larger by a factor of the number of ranks.

    Args:
        tensor: the same shape and dtype on all ranks, of at least one dimension.
        compression: compresses the tensor for transfer.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        name: the operation's name, equal on all ranks; None numbers it (in a graph, by kind and order).
        process_set: the ranks that take part, all by default.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the result; equal on all ranks.
    """
    return grouped_reducescatter(
        [tensor], compression, op, name, process_set, prescale_factor=prescale_factor, postscale_factor=postscale_factor
    )[0]


@without_autograph
def grouped_reducescatter(  # noqa: PLR0917  the order of the arguments is Horovod's
    tensors: Sequence[Any],
    compression: Compressor = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Reduce and scatter several tensors in one operation; see ``reducescatter``."""
    if not tensors:
        return []
    require_compressor(compression)
    packed, contexts = zip(*(compression.compress(dense_tensor(tensor)) for tensor in tensors), strict=True)
    full_name = graph_name("reducescatter", name)

    def run(*eager: tf.Tensor) -> Sequence[Array]:
        arrays = [array_of(value, "The tensor to reduce") for value in eager]
        options: Any = {"prescale": prescale_factor, "postscale": postscale_factor}
        return session.current().grouped_reducescatter(arrays, op, name=full_name, process_set=process_set, **options)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*values: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if op not in {ReduceOp.AVERAGE, ReduceOp.SUM}:
                raise ConfigError(f"A reducescatter with op={op} has no gradient; use Average or Sum.")
            ranks = size_of(process_set) if op is ReduceOp.SUM else 1
            gathered = grouped_allgather(upstream, full_name and f"{full_name}.gradient", process_set)
            whole = [_require_all_rows(*pair) for pair in zip(gathered, values, strict=True)]
            return _with_own_scales(whole, ranks * prescale_factor * postscale_factor)

        return outside_graph(run, values, [(value.dtype, _shape_with_any_rows(value)) for value in values]), gradient

    results = differentiable(*packed)
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


@without_autograph
def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet | None = None
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Send a part of the tensor to every rank, and concatenate the parts received from all ranks, in rank order.

    With ``splits`` the result is a pair: the received rows, and a tensor with the number of rows from each rank. For
    the gradient, every rank returns the gradient of the rows that it received from this rank.

    Args:
        tensor: rows for all ranks, in rank order; the same dtype and shape on all ranks but for the first dimension.
        splits: the number of rows for each rank, a list or a tensor of integers; equal numbers when None.
        name: the operation's name, equal on all ranks; None numbers it (in a graph, by kind and order).
        process_set: the ranks that take part, all by default.
    """
    tensor = dense_tensor(tensor)
    full_name = graph_name("alltoall", name)
    split_tensors = [] if splits is None else [_row_counts(splits)]

    def run(value: tf.Tensor, *rows: tf.Tensor) -> Sequence[Any]:
        content, received = session.current().alltoall(
            array_of(value, "The tensor to send"),
            rows[0].numpy().tolist() if rows else None,
            name=full_name,
            process_set=process_set,
        )
        return [content, np.array(received, np.int64)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(value: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Any]:
        like = [(value.dtype, _shape_with_any_rows(value)), (tf.int64, tf.TensorShape([None]))]
        content, received = outside_graph(run, [value, *split_tensors], like)

        def gradient(upstream: tf.Tensor, _rows_gradient: Any) -> tf.Tensor:
            return alltoall(upstream, received, full_name and f"{full_name}.gradient", process_set)[0]

        return (content, received), gradient

    content, received = differentiable(tensor)
    return content if splits is None else (content, received)


@without_autograph
def barrier(process_set: ProcessSet | None = None) -> None:
    """Return once every rank of the process set (all ranks by default) has called it; inside a graph, at every run."""

    def run() -> Sequence[tf.Tensor]:
        session.current().barrier(process_set=process_set)
        return [tf.constant(True)]

    outside_graph(run, [], [(tf.bool, tf.TensorShape([]))])


@without_autograph
def join(process_set: ProcessSet | None = None) -> tf.Tensor:
    """Announce that this rank has no more data, wait until all ranks have joined, and return the last rank to join.

    While it waits, this rank takes part in the other ranks' allreduces and reducescatters with zeros (an average still
    divides by the number of all ranks), in their allgathers without rows, in their barriers, and in broadcasts of a
    root that has not joined. Other collectives fail.
    """

    def run() -> Sequence[tf.Tensor]:
        return [tf.constant(session.current().join(process_set=process_set), tf.int64)]

    return outside_graph(run, [], [(tf.int64, tf.TensorShape([]))])[0]


def reduce_slices(
    slices: Sequence[tf.IndexedSlices], reduction: Reduction, name: str | None, process_set: ProcessSet | None
) -> list[tf.IndexedSlices]:
    """Gather the rows of all ranks and add up those with the same index; one call for all slices.

    Optimizers would use the squares of repeated rows instead of the square of their sum, so their result would depend
    on the number of ranks. Means of integers are not truncated: they have the dtype of TensorFlow's division.
    """
    if not slices:
        return []
    op, prescale, postscale = reduction
    if op not in {ReduceOp.AVERAGE, ReduceOp.SUM}:
        raise UnsupportedError(
            f"tf.IndexedSlices can be averaged or summed, not combined with op={op}; convert them to dense first."
        )
    size = size_of(process_set)
    ranks = size if op is ReduceOp.AVERAGE else 1
    values = [_in_division_dtype(item.values) if op is ReduceOp.AVERAGE else item.values for item in slices]
    parts = [part for item, own in zip(slices, values, strict=True) for part in (_scaled(own, prescale), item.indices)]
    gathered = grouped_allgather(parts, name, process_set)
    sums = [
        _sums_by_index(_with_gradient_of_sum(values, size), indices)
        for values, indices in zip(gathered[::2], gathered[1::2], strict=True)
    ]
    return [
        tf.IndexedSlices(_scaled(values, postscale, ranks), indices, dense_shape=item.dense_shape)
        for item, (values, indices) in zip(slices, sums, strict=True)
    ]


def _row_counts(splits: Any) -> tf.Tensor:
    """Return the splits of an alltoall as a tensor; its values may be unknown until a graph runs."""
    try:
        counts = tf.convert_to_tensor(splits)
    except (TypeError, ValueError):
        raise invalid_splits(splits) from None
    if not counts.dtype.is_integer:  # a cast would round them
        raise invalid_splits(splits)
    return tf.cast(counts, tf.int64)


def _sums_by_index(values: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the sums of the rows with the same index, and the indices without repetitions."""
    unique, positions = tf.unique(indices)
    is_integer = values.dtype.is_integer or values.dtype.is_bool
    terms = tf.cast(values, tf.int64) if is_integer else values  # TensorFlow cannot add all types of integers
    return tf.cast(tf.math.unsorted_segment_sum(terms, positions, tf.size(unique)), values.dtype), unique


def _with_gradient_of_sum(gathered: tf.Tensor, ranks: Any) -> tf.Tensor:
    """Return the rows with the gradient of an allreduced sum; an allgather's is the mean over the ranks."""
    if not gathered.dtype.is_floating:
        return gathered

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(values: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tf.identity(values), lambda upstream: upstream * as_dtype(ranks, upstream.dtype)

    return differentiable(gathered)


def _in_division_dtype(values: tf.Tensor) -> tf.Tensor:
    """Return integers in the dtype of TensorFlow's division; other values are unchanged.

    The means of dense integers are truncated. Here, each rank has only its share of a row's mean, which must not be
    truncated.
    """
    return tf.math.truediv(values, tf.ones([], values.dtype)) if values.dtype.is_integer else values


def _scaled(values: tf.Tensor, factor: float, divisor: Any = 1) -> tf.Tensor:
    """Multiply by ``factor / divisor``; inside a graph of an elastic job, the divisor is a tensor."""
    if not tf.is_tensor(divisor) and factor == divisor == 1:
        return values
    if values.dtype.is_floating:
        return values * as_dtype(factor / divisor, values.dtype)
    # Integers are scaled like those of dense tensors: in double, then truncated.
    return tf.cast(tf.cast(values, tf.float64) * factor / divisor, values.dtype)


def _require_all_rows(gathered: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Return the gathered rows of the gradient of a reducescatter; raise an error if rows are missing."""
    check = tf.debugging.assert_equal(tf.shape(gathered)[0], tf.shape(value)[0], MISSING_GRADIENTS)
    with tf.control_dependencies([] if check is None else [check]):
        return tf.ensure_shape(gathered, value.shape)


def _with_own_scales(gradients: Sequence[tf.Tensor], scale: Any) -> list[tf.Tensor]:
    """Scale gradients after their exchange, because the prescale may differ between ranks."""
    if not tf.is_tensor(scale) and scale == 1.0:
        return list(gradients)
    return [gradient * as_dtype(scale, gradient.dtype) for gradient in gradients]


def _shape_with_any_rows(tensor: tf.Tensor) -> tf.TensorShape:
    return tf.TensorShape([None, *tensor.shape[1:]]) if tensor.shape.rank else tensor.shape
