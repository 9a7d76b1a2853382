"""Raises ``ImportError``: it is a part of Horovod's launcher on Ray."""

from __future__ import annotations

from horovod._refusals import NO_RAY_PARTS

raise ImportError(NO_RAY_PARTS)
