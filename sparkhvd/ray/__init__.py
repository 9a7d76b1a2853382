"""Ranks that stay in a Ray cluster between calls: ``from sparkhvd.ray import RayExecutor``.

``sparkhvd.run(fn, launcher="ray")`` runs a single function in a Ray cluster, and ``sparkhvd.run_elastic`` an elastic
job.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sparkhvd.compat.horovod import missing, not_installed

if TYPE_CHECKING:
    from sparkhvd.ray.elastic import ElasticRayExecutor as ElasticRayExecutor
    from sparkhvd.ray.elastic import ElasticRaySettings as ElasticRaySettings
    from sparkhvd.ray.executor import RayExecutor as RayExecutor
    from sparkhvd.ray.settings import RaySettings as RaySettings

_MODULES = {
    "ElasticRayExecutor": "elastic",
    "ElasticRaySettings": "elastic",
    "RayExecutor": "executor",
    "RaySettings": "settings",
}
__all__ = ["ElasticRayExecutor", "ElasticRaySettings", "RayExecutor", "RaySettings"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(missing("sparkhvd.ray", name, __all__))
    try:
        module = import_module(f"sparkhvd.ray.{_MODULES[name]}")  # Ray may be missing
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise ModuleNotFoundError(not_installed(f"sparkhvd.ray.{name}", "ray"), name="ray") from error
    return getattr(module, name)
