"""``ElasticRayExecutor``, under the name of Horovod's module."""

from __future__ import annotations

from horovod.ray.elastic import ElasticRayExecutor, RayHostDiscovery

__all__ = ["ElasticRayExecutor", "RayHostDiscovery"]
