"""The exchange of gradients on the backend that Keras runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.options import Reduction, require_compressor
from sparkhvd.comm.process_sets import ProcessSet, exchanges_with
from sparkhvd.errors import ConfigError, UnsupportedError

Exchange = Callable[[Sequence[Any]], list[Any]]


def supported_backend() -> str:
    """Return the backend that Keras runs on.

    Raises:
        ConfigError: sparkhvd has no collectives for it.
    """
    backend: str = keras.config.backend()
    if backend not in {"tensorflow", "torch"}:
        raise ConfigError(
            f"Keras runs on the backend {backend!r}, but sparkhvd trains Keras models only on tensorflow and torch. "
            "Set KERAS_BACKEND to one of them before keras is imported."
        )
    return backend


def gradient_exchange(  # noqa: PLR0917
    name: str,
    compression: Any,
    sparse_as_dense: bool,
    op: ReduceOp,
    predivide: float,
    process_set: ProcessSet | None = None,
) -> Exchange:
    """Return a function that combines this rank's gradients with those of all ranks, in order; None stays None.

    Raises:
        ConfigError: the settings contradict each other, or Keras runs on a backend other than TensorFlow and PyTorch.
    """
    backend = supported_backend()
    if compression is not None:
        require_compressor(compression)
    if op not in {ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM}:
        raise UnsupportedError(f"Gradients can be combined with op=Average, op=Sum or op=Adasum, not {op}.")
    if predivide != 1.0 and op is not ReduceOp.AVERAGE:
        raise ConfigError(f"gradient_predivide_factor={predivide} needs op=Average, not {op}.")
    if backend == "tensorflow":
        from sparkhvd.tensorflow.compression import Compression  # noqa: PLC0415  (only the backend in use is imported)
        from sparkhvd.tensorflow.gradients import GradientExchange  # noqa: PLC0415

        return GradientExchange(
            name, compression or Compression.none, sparse_as_dense, op, predivide, process_set
        ).reduce
    return _torch_exchange(name, compression, op, predivide, process_set)


def scaled(gradient: Any, factor: Any) -> Any:
    """Multiply a gradient by a number; None stays None, and the gradient of an embedding stays sparse."""
    if gradient is None:
        return None
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)

        from sparkhvd.tensorflow.tensors import as_dtype  # noqa: PLC0415

        return tf.math.scalar_mul(as_dtype(factor, gradient.dtype), gradient)
    return gradient * factor


def is_overwritten(variable: Any) -> bool:
    """Return whether the gradient of a variable is the variable's new value, as in layers that compute in float8."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def maximum_exchange(name: str, process_set: ProcessSet | None) -> Exchange:
    """Return a function that replaces tensors with their maxima over the ranks, in order; None stays None."""

    def largest(values: Sequence[Any]) -> list[Any]:
        present = {f"{name}.{index}": value for index, value in enumerate(values) if value is not None}
        found = iter(_maxima(present, process_set) if exchanges_with(process_set) else present.values())
        return [None if value is None else next(found) for value in values]

    return largest


def _maxima(by_name: Mapping[str, Any], process_set: ProcessSet | None) -> list[Any]:
    if keras.config.backend() == "tensorflow":
        from sparkhvd.tensorflow.operations import reduce_dense  # noqa: PLC0415  (only the backend in use is imported)
        from sparkhvd.tensorflow.tensors import without_autograph  # noqa: PLC0415

        reduce = without_autograph(reduce_dense)
        maxima: list[Any] = reduce(
            list(by_name.values()), Reduction(ReduceOp.MAX), list(by_name), process_set=process_set
        )
        return maxima
    import sparkhvd.torch as hvd  # noqa: PLC0415  (only the backend in use is imported)

    handles = [
        hvd.allreduce_async(value, op=ReduceOp.MAX, name=name, process_set=process_set)
        for name, value in by_name.items()
    ]
    return [handle.wait() for handle in handles]


def set_size(process_set: ProcessSet | None) -> Any:
    """Return the number of ranks in the process set; inside a TensorFlow graph of an elastic job, as a tensor."""
    if keras.config.backend() == "tensorflow":
        from sparkhvd.tensorflow.tensors import size_of  # noqa: PLC0415  (only the backend in use is imported)

        return size_of(process_set)
    return session.current().channel(process_set).size


def _torch_exchange(
    name: str, compression: Any, op: ReduceOp, predivide: float, process_set: ProcessSet | None
) -> Exchange:
    import sparkhvd.torch as hvd  # noqa: PLC0415  (only the backend in use is imported)

    def reduce(gradients: Sequence[Any]) -> list[Any]:
        if not exchanges_with(process_set):
            return list(gradients)
        handles = [
            None
            if gradient is None
            else hvd.allreduce_async(
                gradient,
                compression=compression or hvd.Compression.none,
                op=op,
                name=f"{name}.{index}",
                prescale_factor=1 / predivide,
                postscale_factor=predivide,
                process_set=process_set,
            )
            for index, gradient in enumerate(gradients)
        ]
        return [None if handle is None else handle.wait() for handle in handles]

    return reduce
