"""Conversion of NumPy values to plain Python values."""

from __future__ import annotations

from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Convert NumPy numbers and arrays, such as the results of ``numpy.logspace``, to Python numbers and lists."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if type(value) in {list, tuple}:
        return type(value)(item.item() if isinstance(item, np.generic) else item for item in value)
    if type(value) is dict:
        return {key: item.item() if isinstance(item, np.generic) else item for key, item in value.items()}
    return value
