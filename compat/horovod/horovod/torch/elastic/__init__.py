"""``horovod.torch.elastic`` on top of ``sparkhvd.torch.elastic``."""

from __future__ import annotations

from horovod.common.elastic import run_fn
from horovod.torch.elastic import sampler
from sparkhvd.torch import elastic as _elastic
from sparkhvd.torch.elastic import *  # noqa: F403  its __all__ lists the names

__all__ = ["run_fn"]
__all__ += _elastic.__all__

ElasticSampler = sampler.ElasticSampler  # type: ignore[misc]  # replaces sparkhvd's
