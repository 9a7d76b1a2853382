"""``ElasticRayExecutor`` and the discovery, under the names of Horovod's module."""

from __future__ import annotations

from horovod.ray import elastic
from horovod.ray.elastic import ElasticRayExecutor

__all__ = ["ElasticRayExecutor", "RayHostDiscovery"]


class RayHostDiscovery(elastic.RayHostDiscovery):
    """See ``horovod.ray.elastic.RayHostDiscovery``; this module of Horovod has other names for the arguments."""

    def __init__(self, use_gpu: bool = False, cpus_per_worker: int = 1, gpus_per_worker: int = 1) -> None:
        super().__init__(use_gpu, cpus_per_worker, gpus_per_worker)
