"""The exchange of gradients in whichever backend Keras runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from sparkhvd.comm.buffers import ReduceOp
from sparkhvd.errors import ConfigError

Exchange = Callable[[Sequence[Any]], list[Any]]


def gradient_exchange(name: str, compression: Any, sparse_as_dense: bool, op: ReduceOp, predivide: float) -> Exchange:
    """A function from this rank's gradients to those of all ranks, in the same order; None stays None.

    Raises:
        ConfigError: the settings contradict each other, or Keras runs on a backend other than TensorFlow and PyTorch.
    """
    backend = keras.config.backend()
    if backend == "tensorflow":
        from sparkhvd.tensorflow.compression import Compression  # noqa: PLC0415  (only the backend in use is imported)
        from sparkhvd.tensorflow.gradients import GradientExchange  # noqa: PLC0415

        return GradientExchange(name, compression or Compression.none, sparse_as_dense, op, predivide).reduce
    if backend == "torch":
        return _torch_exchange(name, compression, op, predivide)
    raise ConfigError(
        f"Keras runs on {backend!r}; sparkhvd.keras works with the backends tensorflow and torch. Set KERAS_BACKEND "
        "before keras is imported."
    )


def _torch_exchange(name: str, compression: Any, op: ReduceOp, predivide: float) -> Exchange:
    import sparkhvd.torch as hvd  # noqa: PLC0415  (only the backend in use is imported)

    if compression is not None:
        raise ConfigError("compression= of sparkhvd.keras works with the TensorFlow backend; leave it away with torch.")

    def reduce(gradients: Sequence[Any]) -> list[Any]:
        handles = [
            None
            if gradient is None
            else hvd.allreduce_async(
                gradient, op=op, name=f"{name}.{index}", prescale_factor=1 / predivide, postscale_factor=predivide
            )
            for index, gradient in enumerate(gradients)
        ]
        return [None if handle is None else handle.wait() for handle in handles]

    return reduce
