"""Raises ``ImportError``: its loaders wrap petastorm's readers."""

from __future__ import annotations

from horovod._refusals import NO_PETASTORM_MODULES

raise ImportError(NO_PETASTORM_MODULES)
