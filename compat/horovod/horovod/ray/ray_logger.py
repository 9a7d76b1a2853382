"""Values that elastic jobs on Ray send to the driver."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

__all__ = ["log"]


def log(info_dict: Mapping[str, Any]) -> None:  # noqa: ARG001
    """Warn that nobody receives the values, as Horovod does in jobs that are not elastic."""
    warnings.warn("ray_logger.log() has no effect: its receivers are the callbacks of elastic jobs.", stacklevel=2)
