"""``RayExecutor`` and ``ElasticRayExecutor``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkhvd import ray as _ray

__all__ = ["ElasticRayExecutor", "RayExecutor"]


class RayExecutor(_ray.RayExecutor):
    """See ``sparkhvd.ray.RayExecutor``. ``callbacks`` have no effect."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,  # noqa: ARG002
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on all ranks, and return the results in rank order."""
        return super().run(fn, args, kwargs)

    def execute(
        self,
        fn: Callable[[Any], Any],
        callbacks: Sequence[Callable[..., Any]] | None = None,  # noqa: ARG002
    ) -> list[Any]:
        """Run ``fn(executable)`` on all ranks, and return the results in rank order."""
        return super().execute(fn)


class ElasticRayExecutor(_ray.ElasticRayExecutor):
    """See ``sparkhvd.ray.ElasticRayExecutor``. ``callbacks`` have no effect."""

    def run(
        self,
        worker_fn: Callable[[], Any],
        callbacks: Sequence[Callable[..., Any]] | None = None,  # noqa: ARG002
    ) -> list[Any]:
        """Run ``worker_fn()`` in an elastic job, and return the results in rank order."""
        return super().run(worker_fn)
