"""Collectives on TensorFlow tensors, in eager mode and inside ``tf.function``, with gradients.

Every function starts all its operations before it waits for the first, so that the core can fuse them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import Array, ReduceOp
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError
from sparkhvd.tensorflow import gpu
from sparkhvd.tensorflow.compression import Compression, Compressor
from sparkhvd.tensorflow.tensors import array_of, as_written, graph_name, outside_graph


def reduction(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """The reduction that the arguments ask for: the mean unless they say otherwise.

    Raises:
        ConfigError: both are given.
    """
    if average is None:
        return ReduceOp.AVERAGE if op is None else ReduceOp(op)
    if op is not None:
        raise ConfigError(f"average={average} and op={op} were both given; give op alone, average is deprecated.")
    warnings.warn("average= is deprecated; pass op=hvd.Average or op=hvd.Sum.", DeprecationWarning, stacklevel=3)
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


@as_written
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
        tensor: a dense tensor with the same shape and dtype on all ranks, or ``tf.IndexedSlices``, which are gathered
            (for ``Average`` and ``Sum``) because their rows differ among ranks.
        average: deprecated, use ``op``.
        compression: what the tensor travels as.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: multiplies the values before the reduction.
        postscale_factor: multiplies the result; equal on all ranks.
        name: what the ranks know the operation by; made by counting (in a graph, from the tensor's name) when None.
        process_set: the ranks that take part, all by default.

    Raises:
        ConfigError: slices with another reduction than a sum or mean, or a dtype that collectives do not have.
        MismatchError: the ranks disagree.
    """
    op = reduction(average, op)
    if isinstance(tensor, tf.IndexedSlices):
        return reduce_slices([tensor], op, prescale_factor * postscale_factor, name, process_set)[0]
    return grouped_allreduce(
        [tensor],
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
    )[0]


@as_written
def grouped_allreduce(  # noqa: PLR0917  the order of the arguments is Horovod's
    tensors: Sequence[Any],
    average: bool | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> list[tf.Tensor]:
    """``allreduce`` of several dense tensors at once; see there."""
    if not tensors:
        return []
    op = reduction(average, op)
    packed, contexts = zip(*(compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors), strict=True)
    names = [
        graph_name("allreduce", f"{name}.{i}" if name and len(packed) > 1 else name, t) for i, t in enumerate(packed)
    ]

    def reduce(values: Sequence[tf.Tensor], suffix: str) -> list[tf.Tensor]:
        def run(*eager: tf.Tensor) -> Sequence[Array | tf.Tensor]:
            communicator = session.current()
            ids = [each and each + suffix for each in names]
            if gpu.by_nccl(eager, op, process_set):
                return gpu.allreduce(eager, op, prescale_factor, postscale_factor, ids, process_set)
            handles = [
                communicator.allreduce_async(
                    array_of(value, f"Tensor {each or ''}".rstrip()),
                    op,
                    name=each,
                    prescale=prescale_factor,
                    postscale=postscale_factor,
                    process_set=process_set,
                )
                for value, each in zip(eager, ids, strict=True)
            ]
            return [handle.wait() for handle in handles]

        return outside_graph(run, values, [(value.dtype, value.shape) for value in values])

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*values: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if op not in {ReduceOp.AVERAGE, ReduceOp.SUM}:
                raise ConfigError(f"An allreduce with op={op} has no gradient; use Average or Sum.")
            return reduce(upstream, ".gradient")

        return reduce(values, ""), gradient

    results = differentiable(*packed)
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


@as_written
def broadcast(tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None) -> tf.Tensor:
    """The tensor of ``root_rank``, as a new tensor on every rank.

    The gradient on the root is the mean of the ranks' gradients, elsewhere zero.

    Args:
        tensor: the same shape and dtype on all ranks.
        root_rank: the rank whose tensor counts.
        name: what the ranks know the operation by; made by counting (in a graph, from the tensor's name) when None.
        process_set: the ranks that take part, all by default.
    """
    tensor = tf.convert_to_tensor(tensor)
    name = graph_name("broadcast", name, tensor)

    def run(value: tf.Tensor) -> Sequence[Array]:
        array = array_of(value, "The tensor to send")
        return [session.current().broadcast(array, root_rank, name=name, process_set=process_set)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(value: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            mean = allreduce(upstream, name=name and f"{name}.gradient", process_set=process_set)
            return mean if session.current().world.rank == root_rank else tf.zeros_like(mean)

        return outside_graph(run, [value], [(value.dtype, value.shape)])[0], gradient

    return differentiable(tensor)


@as_written
def barrier(process_set: ProcessSet | None = None) -> None:
    """Return once every rank of the process set, all ranks by default, has called it; inside a graph, at every run."""

    def run() -> Sequence[tf.Tensor]:
        session.current().barrier(process_set=process_set)
        return [tf.constant(True)]

    outside_graph(run, [], [(tf.bool, tf.TensorShape([]))])


@as_written
def join(process_set: ProcessSet | None = None) -> tf.Tensor:
    """Tell that this rank has no more data, and wait until all ranks have; the rank that joined last.

    Until then it takes part in the others' allreduces and reducescatters with zeros (an average still divides by the
    number of all ranks), in their allgathers without rows, in their barriers, and in broadcasts of a root that has not
    joined; other collectives fail.
    """

    def run() -> Sequence[tf.Tensor]:
        return [tf.constant(session.current().join(process_set=process_set), tf.int64)]

    return outside_graph(run, [], [(tf.int64, tf.TensorShape([]))])[0]


def reduce_slices(
    slices: Sequence[tf.IndexedSlices], op: ReduceOp, scale: float, name: str | None, process_set: ProcessSet | None
) -> list[tf.IndexedSlices]:
    """The rows of all ranks side by side, which is their sum once they are applied; all in one call."""
    from sparkhvd.tensorflow.movements import grouped_allgather  # noqa: PLC0415  its gradient is an allreduce

    if op not in {ReduceOp.AVERAGE, ReduceOp.SUM}:
        raise ConfigError(f"tf.IndexedSlices can be averaged or summed, not combined with op={op}; make them dense.")
    factor = scale / session.current().channel(process_set).size if op is ReduceOp.AVERAGE else scale
    parts = [part for each in slices for part in (each.values, each.indices)]
    gathered = grouped_allgather(parts, name, process_set)
    return [
        tf.IndexedSlices(values * tf.cast(factor, values.dtype), indices, dense_shape=each.dense_shape)
        for each, values, indices in zip(slices, gathered[::2], gathered[1::2], strict=True)
    ]
