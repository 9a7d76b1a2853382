"""``horovod.torch.elastic`` on top of ``sparkhvd.torch.elastic``."""

from __future__ import annotations

from sparkhvd.torch import elastic as _elastic
from sparkhvd.torch.elastic import *  # noqa: F403  its __all__ lists the names

__all__: list[str] = []
__all__ += _elastic.__all__
