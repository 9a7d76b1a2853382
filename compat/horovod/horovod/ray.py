"""``RayExecutor``, without Horovod's elastic jobs on Ray."""

from __future__ import annotations

from typing import Any, Never

from sparkhvd.ray import RayExecutor

__all__ = ["ElasticRayExecutor", "RayExecutor"]


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
