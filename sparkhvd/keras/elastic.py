"""Raises ``ImportError``: elastic training works for PyTorch only so far."""

from __future__ import annotations

from sparkhvd.compat.horovod import ELASTIC

raise ImportError(ELASTIC)
