"""Raises ``ImportError``: elastic training is not available under this name."""

from __future__ import annotations

from sparkhvd.compat.horovod import ELASTIC

raise ImportError(ELASTIC)
