"""Smaller forms of tensors for their way between the ranks."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """Makes a tensor smaller before a reduction and large again after it; write your own with these two methods.

    The reduction runs on what ``compress`` returns, so sums of compressed tensors must mean compressed sums, and all
    ranks must return the same shape and dtype. A class with two static methods is as good as an instance.
    """

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to reduce, and what ``decompress`` needs to know; must leave ``tensor`` unchanged."""

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """The reduced tensor in the form that ``compress`` was given."""


class NoneCompressor:
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, _context: None = None) -> torch.Tensor:
        """The tensor itself."""
        return tensor


class CastCompressor:
    """Sends floating point tensors in another floating point type; leaves all others, and smaller ones, as they are.

    Args:
        dtype: the type on the way.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """The tensor in the type of the way, and its own type."""
        return tensor.to(self.on_the_way(tensor.dtype)), tensor.dtype

    def decompress(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in the type that it had."""
        return tensor.to(dtype)

    def on_the_way(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which a tensor of ``dtype`` is sent."""
        return self.dtype if dtype.is_floating_point and dtype.itemsize > self.dtype.itemsize else dtype


class Compression:
    """The compressions that come along.

    Attributes:
        none: tensors travel as they are.
        fp16: floats travel with 16 bits: 11 bits of precision, up to 65504 in size. ``gradient_predivide_factor`` keeps
            sums in that range.
        bf16: floats travel as bfloat16: 8 bits of precision, float32's range.
    """

    none = NoneCompressor
    fp16 = CastCompressor(torch.float16)
    bf16 = CastCompressor(torch.bfloat16)
