"""Raises ``ImportError``: its data module wraps petastorm's readers."""

from __future__ import annotations

from horovod._refusals import NO_PETASTORM_MODULES

raise ImportError(NO_PETASTORM_MODULES)
