"""Compression of tensors for transfer."""

from __future__ import annotations

from sparkhvd.tensorflow.compression import Compression, Compressor, FP16Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
