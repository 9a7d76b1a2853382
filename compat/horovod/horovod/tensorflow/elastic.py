"""``horovod.tensorflow.elastic`` on top of ``sparkhvd.tensorflow.elastic`` and ``sparkhvd.keras.elastic``."""

from __future__ import annotations

from horovod.common.elastic import run_fn
from sparkhvd.keras.elastic import KerasState as TensorFlowKerasState
from sparkhvd.tensorflow import elastic as _elastic
from sparkhvd.tensorflow.elastic import *  # noqa: F403  its __all__ lists the names

__all__ = ["TensorFlowKerasState", "run_fn"]
__all__ += _elastic.__all__
