"""``RayExecutor``, without Horovod's elastic jobs on Ray."""

from __future__ import annotations

from sparkhvd.ray import RayExecutor

__all__ = ["RayExecutor"]
