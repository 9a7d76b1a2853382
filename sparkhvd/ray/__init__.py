"""Ranks that stay in a Ray cluster between calls: ``from sparkhvd.ray import RayExecutor``.

``sparkhvd.run(fn, launcher="ray")`` runs a single function in a Ray cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkhvd.compat.horovod import missing, not_installed

if TYPE_CHECKING:
    from sparkhvd.ray.executor import RayExecutor as RayExecutor
    from sparkhvd.ray.settings import RaySettings as RaySettings

__all__ = ["RayExecutor", "RaySettings"]


def __getattr__(name: str) -> object:
    if name == "ElasticRayExecutor":
        raise AttributeError(
            "sparkhvd has no elastic jobs on Ray. sparkhvd.run_elastic() starts them on Spark, on this machine or "
            "through ssh; see docs/how-to/elastic.md."
        )
    if name not in __all__:
        raise AttributeError(missing("sparkhvd.ray", name, __all__))
    try:
        from sparkhvd.ray import executor, settings  # noqa: PLC0415 - Ray may be missing
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise ModuleNotFoundError(not_installed(f"sparkhvd.ray.{name}", "ray"), name="ray") from error
    return executor.RayExecutor if name == "RayExecutor" else settings.RaySettings
