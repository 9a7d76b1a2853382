"""``horovod.tensorflow.keras.elastic`` on top of ``sparkhvd.keras.elastic``."""

from __future__ import annotations

from sparkhvd.keras import elastic as _elastic
from sparkhvd.keras.elastic import *  # noqa: F403  its __all__ lists the names

__all__: list[str] = []
__all__ += _elastic.__all__
