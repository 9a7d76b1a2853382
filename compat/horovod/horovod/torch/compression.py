"""Compression of tensors for transfer."""

from __future__ import annotations

from sparkhvd.torch.compression import Compression, Compressor

__all__ = ["Compression", "Compressor"]
