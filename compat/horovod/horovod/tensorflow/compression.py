"""Compression of tensors for transfer."""

from __future__ import annotations

from sparkhvd.tensorflow.compression import Compression

__all__ = ["Compression"]
