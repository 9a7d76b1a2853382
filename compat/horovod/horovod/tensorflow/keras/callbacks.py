"""The callbacks of ``horovod.keras``."""

from __future__ import annotations

from horovod.keras import callbacks
from horovod.keras.callbacks import *  # noqa: F403  its __all__ lists the names

__all__ = callbacks.__all__
