"""Values that elastic jobs on Ray send to the driver."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

__all__ = ["log"]


def log(info_dict: Mapping[str, Any]) -> None:  # noqa: ARG001
    """Warn that nobody receives the values, because ``callbacks`` have no effect."""
    warnings.warn("ray_logger.log() has no effect: sparkhvd does not call its receivers, the callbacks.", stacklevel=2)
