"""The sampler of elastic jobs."""

from __future__ import annotations

from sparkhvd.torch import elastic as _elastic

__all__ = ["ElasticSampler"]


class ElasticSampler(_elastic.ElasticSampler):
    """See ``sparkhvd.torch.elastic``. Programs call ``record_batch`` once per batch, with a number of their own."""

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002
        """Record that every rank has processed ``batch_size`` more samples."""
        self._record(self._recorded + batch_size)
