"""Smaller numbers on the wire."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import tensorflow as tf


class Compressor(Protocol):
    """How a tensor travels; users may pass their own class or object with these two methods."""

    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """What is sent, and what ``decompress`` needs to know."""

    def decompress(self, tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """The result in the form of the original."""


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, None]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: None) -> tf.Tensor:  # noqa: ARG004
        """The tensor itself."""
        return tensor


class _CastingCompressor:
    dtype: ClassVar[tf.DType]

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        """Floating point tensors in the smaller type, others as they are."""
        return (tf.cast(tensor, cls.dtype) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, context: tf.DType) -> tf.Tensor:
        """The tensor in its original type."""
        return tf.cast(tensor, context)


class FP16Compressor(_CastingCompressor):
    """Sends floating point tensors as float16."""

    dtype: ClassVar[tf.DType] = tf.float16


class BF16Compressor(_CastingCompressor):
    """Sends floating point tensors as bfloat16."""

    dtype: ClassVar[tf.DType] = tf.bfloat16


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
