"""``import horovod.tensorflow.keras as hvd`` on top of ``sparkhvd.keras``."""

from __future__ import annotations

from horovod import keras as _keras
from horovod.keras import *  # noqa: F403  its __all__ lists the names

__all__: list[str] = []
__all__ += _keras.__all__
