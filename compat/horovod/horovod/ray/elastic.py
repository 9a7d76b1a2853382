"""``ElasticRayExecutor``, under the name of Horovod's module."""

from __future__ import annotations

from horovod._refusals import NO_RAY_DISCOVERY
from horovod.ray import ElasticRayExecutor

__all__ = ["ElasticRayExecutor", "RayHostDiscovery"]


class RayHostDiscovery:
    """Cannot be created; programs may derive a class from it."""

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError(NO_RAY_DISCOVERY)
