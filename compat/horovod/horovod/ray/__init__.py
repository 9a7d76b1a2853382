"""``RayExecutor``, without Horovod's elastic jobs on Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

from sparkhvd import ray as _ray

__all__ = ["ElasticRayExecutor", "RayExecutor"]


class RayExecutor(_ray.RayExecutor):
    """See ``sparkhvd.ray.RayExecutor``. ``callbacks`` have no effect, because only elastic jobs call them."""

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


class ElasticRayExecutor:
    """Raises ``NotImplementedError``, because there are no elastic jobs on Ray."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.create_settings()

    @staticmethod
    def create_settings(*_: Any, **__: Any) -> Never:
        """Raise ``NotImplementedError``."""
        raise NotImplementedError(
            "sparkhvd has no elastic jobs on Ray. Use RayExecutor with a constant number of workers, or start an "
            "elastic job with sparkhvd.run_elastic()."
        )
