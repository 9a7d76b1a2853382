"""Raises ``ImportError``: sparkhvd has no elastic training yet."""

from __future__ import annotations

from sparkhvd.compat.horovod import ELASTIC

raise ImportError(ELASTIC)
