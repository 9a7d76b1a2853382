"""``run`` and ``run_elastic``, under the name of Horovod's module."""

from __future__ import annotations

from horovod.spark import run, run_elastic

__all__ = ["run", "run_elastic"]
