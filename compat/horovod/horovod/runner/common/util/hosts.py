"""Raises ``ImportError``: it is a part of Horovod's launcher."""

from __future__ import annotations

from horovod._refusals import NO_LAUNCHER_PARTS

raise ImportError(NO_LAUNCHER_PARTS)
