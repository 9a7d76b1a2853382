"""``horovod.torch.elastic`` on top of ``sparkhvd.torch.elastic``."""

from __future__ import annotations

from sparkhvd.torch import elastic as _elastic
from sparkhvd.torch.elastic import *  # noqa: F403  its __all__ lists the names

__all__: list[str] = []
__all__ += _elastic.__all__


class ElasticSampler(_elastic.ElasticSampler):  # type: ignore[no-redef]  # replaces the imported one
    """See ``sparkhvd.torch.elastic``. Programs call ``record_batch`` once per batch, with a number of their own."""

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002
        """Record that every rank has processed ``batch_size`` more samples."""
        self._record(self._recorded + batch_size)
