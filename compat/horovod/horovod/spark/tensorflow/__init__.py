"""Raises ``ImportError``: it is for the data service."""

from __future__ import annotations

from horovod._refusals import NO_DATA_SERVICE

raise ImportError(NO_DATA_SERVICE)
