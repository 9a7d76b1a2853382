"""Compressors, which make tensors smaller for transfer between the ranks."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import tensorflow as tf


class Compressor(Protocol):
    """Compresses tensors for transfer; users may pass their own class or object with these two methods."""

    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor to send, and the context that ``decompress`` needs."""

    def decompress(self, tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """Return the received tensor in the dtype and form of the original."""


class NoneCompressor:
    """Sends tensors uncompressed."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, None]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: None) -> tf.Tensor:  # noqa: ARG004
        """Return the tensor itself."""
        return tensor


class _CastingCompressor:
    dtype: ClassVar[tf.DType]

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        """Cast a tensor of a larger floating-point dtype; leave others unchanged."""
        casts = tensor.dtype.is_floating and tensor.dtype.size > cls.dtype.size
        return (tf.cast(tensor, cls.dtype) if casts else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, context: tf.DType) -> tf.Tensor:
        """Cast the tensor back to its original dtype."""
        return tf.cast(tensor, context)


class FP16Compressor(_CastingCompressor):
    """Sends floating-point tensors as float16."""

    dtype: ClassVar[tf.DType] = tf.float16


class BF16Compressor(_CastingCompressor):
    """Sends floating-point tensors as bfloat16."""

    dtype: ClassVar[tf.DType] = tf.bfloat16


class Compression:
    """The available compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
