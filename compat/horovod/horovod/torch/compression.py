"""Compression of tensors for transfer."""

from __future__ import annotations

from sparkhvd.torch.compression import Compression, Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor:
    """Compresses like ``Compression.fp16``; a class, so that programs can derive from it."""

    compress = staticmethod(Compression.fp16.compress)
    decompress = staticmethod(Compression.fp16.decompress)
