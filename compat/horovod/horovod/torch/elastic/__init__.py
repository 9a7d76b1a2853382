"""``horovod.torch.elastic`` on top of ``sparkhvd.torch.elastic``."""

from __future__ import annotations

from horovod.torch.elastic.sampler import ElasticSampler
from sparkhvd.torch import elastic as _elastic
from sparkhvd.torch.elastic import *  # noqa: F403  its __all__ lists the names

__all__ = ["ElasticSampler"]
__all__ += [name for name in _elastic.__all__ if name != "ElasticSampler"]
