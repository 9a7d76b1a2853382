"""Compressors, which make tensors smaller for transfer between the ranks."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """Compresses a tensor before a reduction and decompresses the result; write your own with these two methods.

    The reduction runs on what ``compress`` returns: a sum of compressed tensors must be the compressed sum, and all
    ranks must return the same shape and dtype. A class with two static methods works as well as an instance.
    """

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to reduce, and the context that ``decompress`` needs; must not change ``tensor``."""

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return the reduced tensor in the dtype and form of the tensor passed to ``compress``."""


class NoneCompressor:
    """Sends tensors uncompressed."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, _context: None = None) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor


class CastCompressor:
    """Sends floating-point tensors in a smaller floating-point dtype; other tensors are sent unchanged.

    Args:
        dtype: the dtype for transfer.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return the tensor in the dtype for transfer, and its original dtype."""
        return tensor.to(self.wire_dtype(tensor.dtype)), tensor.dtype

    def decompress(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor in its original dtype."""
        return tensor.to(dtype)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor of ``dtype`` is sent."""
        return self.dtype if dtype.is_floating_point and dtype.itemsize > self.dtype.itemsize else dtype


class Compression:
    """The built-in compressors.

    Attributes:
        none: sends tensors uncompressed.
        fp16: sends floats as float16, with 11 bits of precision and values up to 65504. ``gradient_predivide_factor``
            keeps sums in that range.
        bf16: sends floats as bfloat16, with 8 bits of precision and the range of float32.
    """

    none = NoneCompressor
    fp16 = CastCompressor(torch.float16)
    bf16 = CastCompressor(torch.bfloat16)
