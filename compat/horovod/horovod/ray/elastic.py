"""``ElasticRayExecutor``, under the name of Horovod's module."""

from __future__ import annotations

from horovod.ray import ElasticRayExecutor

__all__ = ["ElasticRayExecutor"]
