"""``RayExecutor``, under the name of Horovod's module."""

from __future__ import annotations

from horovod.ray import RayExecutor

__all__ = ["RayExecutor"]
